"""Rows of reasoning_gym's spell_backward (words of 3 to 5 letters), each after four solved ones as turns of a chat: `python docs/runs/spell_backward.py data`.

Writes spell_train.jsonl (10,041 rows) and spell_val.jsonl (256, of other words). The reward is reasoning_gym's own, which gives a share of it for letters in their place.
"""
import json
import sys
from pathlib import Path

import reasoning_gym

OPTIONS = dict(min_word_len=3, max_word_len=5)


def words(size: int, seed: int, leave_out: set) -> list[dict]:
    """The data set's entries, each word once, without those in `leave_out`, which grows."""
    fresh = []
    for entry in reasoning_gym.create_dataset("spell_backward", size=size, seed=seed, **OPTIONS):
        if entry["answer"].lower() not in leave_out:
            leave_out.add(entry["answer"].lower())
            fresh.append(entry)
    return fresh


def turns(entry: dict) -> list[dict]:
    return [{"role": "user", "content": f"Spell backward: {entry['metadata']['word']}"}, {"role": "assistant", "content": entry["answer"]}]


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    seen: set = set()
    shots = [turn for entry in words(4, 10**6, seen) for turn in turns(entry)]
    val = words(2000, 2 * 10**6, seen)[:256]
    train = words(20000, 0, seen)
    for name, entries in (("train", train), ("val", val)):
        rows = [{"prompt": [*shots, turns(e)[0]], "data_source": "reasoning_gym/spell_backward", "reward_model": {"ground_truth": e["answer"]}, "extra_info": e} for e in entries]
        (folder / f"spell_{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(train)} training words, {len(val)} validation words, in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "data"))
