"""Rows of reasoning_gym's chain_sum, each after four solved ones as plain text: `python -m tasks.chain_sum data`.

Writes chain_sum_train.jsonl (10,000 rows) and chain_sum_val.jsonl (256, each another question, none of them in training). The reward is reasoning_gym's own:
1 for the right number, a share for a text that holds it among other characters, as 2/3 for 117 where 17 is right.

A solved one ends with the token at which SmolLM2 stops. Without it the model writes the next line too, and the reward looks at the last line.
"""

import json
import random
import sys
from pathlib import Path

import reasoning_gym

OPTIONS = dict(min_terms=2, max_terms=2, min_digits=1, max_digits=2)
END = "<|im_end|>"


def entries(size: int, seed: int) -> list[dict]:
    return list(reasoning_gym.create_dataset("chain_sum", size=size, seed=seed, **OPTIONS))


def question(entry: dict) -> str:
    return f"{entry['metadata']['expression']} ="


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    val = list({question(e): e for e in entries(2000, 2 * 10**6)}.values())[:256]
    held_out = {question(e) for e in val}
    fresh = [e for e in entries(30000, 0) if question(e) not in held_out]  # one-digit questions come more than once
    train, pool = fresh[:10000], fresh[10000:]
    rng = random.Random(0)
    for name, split in (("train", train), ("val", val)):
        with open(folder / f"chain_sum_{name}.jsonl", "w") as file:
            for e in split:
                worked = "".join(
                    f"{question(shot)} {shot['answer']}{END}\n"
                    for shot in rng.sample(
                        [other for other in rng.sample(pool, 8) if question(other) != question(e)], 4
                    )
                )
                row = {
                    "prompt": f"{worked}{question(e)}",
                    "data_source": "reasoning_gym/chain_sum",
                    "reward_model": {"ground_truth": e["answer"]},
                    "extra_info": e,
                }
                file.write(json.dumps(row) + "\n")
    print(
        f"{len(train)} training rows of {len({question(e) for e in train})} questions, {len(val)} validation rows of as many others, in {folder}"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "data"))
