"""Rows of reasoning_gym's chain_sum, each after four solved ones as plain text: `python -m tasks.chain_sum data`.

Writes chain_sum_train.jsonl (10,000 rows) and chain_sum_val.jsonl (256, each another question, none of them in
training). The reward is reasoning_gym's own: 1 for the right number, a share for a text that holds it among other
characters, as 2/3 for 117 where 17 is right.

A solved one ends with the token at which SmolLM2 stops. Without it the model writes the next line too, and the reward
looks at the last line.
"""

import argparse
import json
import random
from pathlib import Path

import reasoning_gym

OPTIONS = dict(min_terms=2, max_terms=2, min_digits=1, max_digits=2)
END = "<|im_end|>"


def entries(size: int, seed: int) -> list[dict]:
    return list(reasoning_gym.create_dataset("chain_sum", size=size, seed=seed, **OPTIONS))


def question(entry: dict) -> str:
    return f"{entry['metadata']['expression']} ="


def make_row(entry: dict, pool: list[dict], rng: random.Random) -> dict:
    """A row in verl's shape: the question behind four others of the pool with their answers."""
    others = [other for other in rng.sample(pool, 8) if question(other) != question(entry)]
    worked = "".join(f"{question(shot)} {shot['answer']}{END}\n" for shot in rng.sample(others, 4))
    return {
        "prompt": f"{worked}{question(entry)}",
        "data_source": "reasoning_gym/chain_sum",
        "reward_model": {"ground_truth": entry["answer"]},
        "extra_info": entry,
    }


def write(folder: Path) -> None:
    """Write both files. The solved ones come from entries that are in neither."""
    folder.mkdir(parents=True, exist_ok=True)
    by_question = {question(e): e for e in entries(2000, 2 * 10**6)}
    val = list(by_question.values())[:256]
    held_out = {question(e) for e in val}
    fresh = [e for e in entries(30000, 0) if question(e) not in held_out]  # one-digit questions come more than once
    train, pool = fresh[:10000], fresh[10000:]
    rng = random.Random(0)
    for name, split in (("train", train), ("val", val)):
        with open(folder / f"chain_sum_{name}.jsonl", "w") as file:
            for entry in split:
                file.write(json.dumps(make_row(entry, pool, rng)) + "\n")
    num_questions = len({question(e) for e in train})
    print(
        f"{len(train)} training rows of {num_questions} questions, "
        f"{len(val)} validation rows of as many others, in {folder}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m tasks.chain_sum", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=Path("data"), help="where to write them; default: data")
    write(parser.parse_args().folder)
