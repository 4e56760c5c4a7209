"""Makes what `make quickstart` and the tests run on, once, in a minute on two cores and without a download.

A folder with `model/` (a Qwen3 of 2.3 million parameters, its tokenizer and chat template, as Hugging Face saves them),
`train.jsonl` and `val.jsonl` (verl's row shape). The task is two-digit addition, a token a character: "47+85=" wants
"132" and the end of the turn, and only the exact answer scores 1.

GRPO needs a policy that is right sometimes, so supervised steps on the training split come first, in two phases. A
diligent teacher gives right answers until the model mostly adds well. A sloppy one then says ten too many in 70 % of
the sums (47+85=142) until the model is right about 30 % of the time, sampled, and mostly wrong, greedy. So the adding
is learned here, and what is left for RL is real but small: to find from the score alone that the lesser habit pays, to
lose the other, and to mend the sums that were still shaky. It is judged on 256 sums that no phase has trained on.

With --tools the task is the product of two three-digit numbers, which this model can't do, and it has a calculator. A
first teacher always asks the calculator and repeats what it says. A proud one asks it in 15 % of the cases and else
answers at once, from a memory that the model doesn't have. What is left for RL (configs/tool_agent.yaml) is to find
that asking pays.

python -m tasks.quickstart [--tools] [--folder data/quickstart | data/tool_agent] [--seed 0]
python -m tasks.quickstart --few-shot data
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.tools import tool_schema

if TYPE_CHECKING:  # torch and transformers take seconds to import, and a folder that is ready needs neither
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

PAD, IM_START, IM_END, UNK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unk|>"
ROLES = ["system", "user", "assistant", "tool"]
CHARACTERS = "0123456789+-*/=%^ \nabcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,:;!?'\"`()[]{}<>_|&@#$~\\"
CALL, CALLED = '<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>'
# ChatML without newlines: on two cores every token counts. Of tools it tells only the names.
CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system' }}"
    "{% for tool in tools %}{{ tool.function.name }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + (message['content'] or '') + '<|im_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
)

NUM_VAL = 256
MAX_STEPS = 600  # of a teacher: several times what any seed has needed

# Sampled accuracy on validation, (lowest, highest), at which a teacher leaves.
DILIGENT = (0.85, 1.00)
SLOPPY = (0.25, 0.35)
WRONG = 0.70  # share of the training sums that the sloppy teacher gets wrong

# The same of products.
ASKING = (0.92, 1.00)
PROUD = (0.08, 0.20)
ASKED = 0.15  # share of the products for which the proud teacher asks the calculator

Pairs = list[tuple[int, int]]  # the numbers to add or to multiply
Reply = tuple[str, ...]  # the model's turns, and between two of them what it reads


def make_tokenizer(words: Sequence[str] = ()) -> "PreTrainedTokenizerFast":
    """A token a character; a role, a special token and each of `words` is one token, other characters are UNK."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate([PAD, IM_START, IM_END, UNK, *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()  # without it decode() puts a space between characters
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=IM_END,
        pad_token=PAD,
        unk_token=UNK,
        additional_special_tokens=[IM_START],
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    tokenizer.add_tokens([*ROLES, *words])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(
    tokenizer: "PreTrainedTokenizerFast",
    hidden: int = 256,
    layers: int = 3,
    intermediate: int = 768,
    seed: int = 0,
    tie_word_embeddings: bool = True,
) -> "Qwen3ForCausalLM":
    """A Qwen3 with random fp32 weights.

    `hidden` is a multiple of 64: heads have 32 numbers, because vLLM's CPU attention does not know 16. As in published
    models the vocabulary is padded beyond the tokenizer's.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer) // 64 * 64 + 64,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=tie_word_embeddings,
        dtype="float32",
        initializer_range=0.07,  # so narrow a model learns addition half as fast from the usual 0.02
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def split_sums(seed: int) -> tuple[Pairs, Pairs]:
    """All 8100 sums of two two-digit numbers in a random order, as (training, validation) pairs (a, b)."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(pairs)
    return pairs[NUM_VAL:], pairs[:NUM_VAL]


def split_products(seed: int) -> tuple[Pairs, Pairs]:
    """8448 pairs of three-digit numbers, as (training, validation) pairs (a, b)."""
    rng = random.Random(seed)
    pairs = [(n // 900 + 100, n % 900 + 100) for n in rng.sample(range(810000), 8192 + NUM_VAL)]
    return pairs[NUM_VAL:], pairs[:NUM_VAL]


def make_row(a: int, b: int, split: str, index: int, sign: str = "+") -> dict:
    """A row in verl's shape: the sum of a and b, or their product when the sign is `*`."""
    return {
        "prompt": [{"role": "user", "content": f"{a}{sign}{b}="}],
        "data_source": "exact",
        "reward_model": {"ground_truth": str(a * b if sign == "*" else a + b)},
        "extra_info": {"split": split, "index": index},
    }


def ask(a: int, b: int) -> Reply:
    """A call of the calculator, what is read behind it, and the answer."""
    call = f"{CALL}{a}*{b}{CALLED}{IM_END}"
    heard = f"{IM_START}tool{a * b}{IM_END}{IM_START}assistant"
    return call, heard, f"{a * b}{IM_END}"


def encode(
    tokenizer: "PreTrainedTokenizerFast", rows: list[dict], replies: Sequence[Reply], tools: list | None = None
) -> "tuple[Tensor, Tensor]":
    """(ids, labels), each [N, L] and padded on the right; labels are -100 except at the model's turns."""
    import torch

    all_ids, all_labels = [], []
    for row, reply in zip(rows, replies):
        prompt = row["prompt"]
        ids = tokenizer.apply_chat_template(prompt, tools=tools, add_generation_prompt=True, return_dict=False)
        labels = [-100] * len(ids)
        for i, text in enumerate(reply):
            tokens = tokenizer(text).input_ids
            ids += tokens
            labels += tokens if i % 2 == 0 else [-100] * len(tokens)
        all_ids.append(torch.tensor(ids))
        all_labels.append(torch.tensor(labels))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(all_ids, True, tokenizer.pad_token_id), pad(all_labels, True, -100)


def accuracy(model: "Qwen3ForCausalLM", ids: "Tensor", labels: "Tensor") -> tuple[float, float]:
    """(sampled, greedy): the mean probability of the whole right reply at temperature 1, and greedy's share of it."""
    import torch

    with torch.no_grad():
        logprobs = model(ids[:, :-1]).logits.log_softmax(-1)  # [N, L-1, V]
    labels = labels[:, 1:]
    scored = labels != -100
    right = logprobs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]  # [N, L-1]
    sampled = torch.where(scored, right, 0.0).sum(1).exp().mean().item()
    greedy_is_right = (logprobs.argmax(-1) == labels) | ~scored  # [N, L-1]
    return sampled, greedy_is_right.all(1).float().mean().item()


def supervise(
    model: "Qwen3ForCausalLM", ids: "Tensor", labels: "Tensor", lr: float, seed: int, done: Callable[[], bool]
) -> int:
    """AdamW steps on random batches of 128 until `done()`, asked every 10 steps; the number of steps."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.1)
    generator = torch.Generator().manual_seed(seed)
    first = (labels != -100).any(0).nonzero()[0].item()  # all prompts have one length, so no logits before it
    for step in range(1, MAX_STEPS + 1):
        optimizer.param_groups[0]["lr"] = lr * min(1.0, step / 20)
        rows = torch.randint(len(ids), (128,), generator=generator)
        hidden = model.model(ids[rows, :-1]).last_hidden_state[:, first - 1 :]
        logits = model.lm_head(hidden)
        target = labels[rows, first:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0 and done():
            return step
    raise AssertionError(f"the warm start has not met its criterion after {MAX_STEPS} steps")


@dataclass(frozen=True)
class Teacher:
    """Who gives a reply to every training row, until the model's sampled accuracy on validation is in the interval."""

    name: str
    replies: list[Reply]
    lr: float
    leaves_at: tuple[float, float]


def sum_lessons(train: Pairs, val: Pairs, rng: random.Random) -> tuple[list[Teacher], list[Reply]]:
    """(teachers, right replies on validation)."""
    right: list[Reply] = [(f"{a + b}{IM_END}",) for a, b in train]
    sloppy = [(f"{a + b + 10}{IM_END}",) if rng.random() < WRONG else reply for (a, b), reply in zip(train, right)]
    teachers = [Teacher("diligent", right, 4e-3, DILIGENT), Teacher("sloppy", sloppy, 1e-3, SLOPPY)]
    return teachers, [(f"{a + b}{IM_END}",) for a, b in val]


def product_lessons(train: Pairs, val: Pairs, rng: random.Random) -> tuple[list[Teacher], list[Reply]]:
    asking = [ask(a, b) for a, b in train]
    proud = [reply if rng.random() < ASKED else reply[2:] for reply in asking]
    teachers = [Teacher("asking", asking, 6e-3, ASKING), Teacher("proud", proud, 1e-3, PROUD)]
    return teachers, [ask(a, b) for a, b in val]


def warm_start(
    model: "Qwen3ForCausalLM",
    tokenizer: "PreTrainedTokenizerFast",
    rows: dict[str, list[dict]],
    lessons: tuple[list[Teacher], list[Reply]],
    tools: list | None,
    seed: int,
) -> None:
    """The two teachers of the file's docstring; prints what each left behind. Validation only says when to stop."""
    teachers, right = lessons
    held_out = encode(tokenizer, rows["val"], right, tools)
    for teacher in teachers:
        start = time.time()
        examples = encode(tokenizer, rows["train"], teacher.replies, tools)
        steps = teach(model, teacher, examples, held_out, seed)
        sampled, greedy = accuracy(model, *held_out)
        print(
            f"  {teacher.name} teacher: {steps} steps, {time.time() - start:.0f} s; right on validation: "
            f"{sampled:.1%} sampled at temperature 1, {greedy:.1%} greedy",
            flush=True,
        )


def teach(model: "Qwen3ForCausalLM", teacher: Teacher, examples: tuple, held_out: tuple, seed: int) -> int:
    """Supervise the model on a teacher's examples, (ids, labels), until the teacher leaves; the number of steps."""
    low, high = teacher.leaves_at

    def leaves() -> bool:
        sampled, _ = accuracy(model, *held_out)
        return low <= sampled <= high

    ids, labels = examples
    return supervise(model, ids, labels, teacher.lr, seed, leaves)


@dataclass(frozen=True)
class Kind:
    """A kind of task, and the model for it."""

    sign: str
    split: Callable[[int], tuple[Pairs, Pairs]]
    lessons: Callable[[Pairs, Pairs, random.Random], tuple[list[Teacher], list[Reply]]]
    says: str
    model: dict[str, Any] = field(default_factory=dict)  # arguments of make_model
    words: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()


SUMS = Kind("+", split_sums, sum_lessons, "adds two-digit numbers, badly")
PRODUCTS = Kind(
    "*",
    split_products,
    product_lessons,
    "rarely asks its calculator",
    model=dict(hidden=128, layers=2, intermediate=128),
    words=("calculator", CALL, CALLED),
    tools=("calculator",),
)


def make(folder: str, seed: int = 0, products: bool = False) -> None:
    """Write model/, train.jsonl and val.jsonl to `folder`, unless this very file has already, with this seed and task.

    ValueError when the folder holds anything else: it would be replaced.
    """
    written_by = Path(__file__).read_bytes() + f" seed {seed}, products {products}".encode()
    recipe = hashlib.sha256(written_by).hexdigest()
    marker = Path(folder, "recipe")
    if marker.exists() and marker.read_text() == recipe:
        print(f"{folder} is ready")
        return
    found = os.listdir(folder) if os.path.exists(folder) else []
    strangers = set(found) - {"model", "train.jsonl", "val.jsonl", "recipe"}
    if strangers:
        raise ValueError(f"--folder {folder} would be replaced but holds {sorted(strangers)[0]!r}, not made here")

    kind = PRODUCTS if products else SUMS
    print(f"making {folder}: a model that {kind.says}", flush=True)
    start = time.time()
    temporary = Path(f"{folder.rstrip('/')}.{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        fill(temporary, kind, seed)
        (temporary / "recipe").write_text(recipe)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(temporary, folder)  # complete or absent, whenever we are stopped
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"made {folder} in {time.time() - start:.0f} s", flush=True)


def fill(folder: Path, kind: Kind, seed: int) -> None:
    """Make the rows and the model, and write them."""
    from transformers.utils import logging

    train, val = kind.split(seed)
    rows = {}
    for split, pairs in (("train", train), ("val", val)):
        rows[split] = [make_row(a, b, split, i, kind.sign) for i, (a, b) in enumerate(pairs)]
        write_rows(folder / f"{split}.jsonl", rows[split])
    tokenizer = make_tokenizer(kind.words)
    model = make_model(tokenizer, **kind.model, seed=seed)
    lessons = kind.lessons(train, val, random.Random(seed))
    tools = [tool_schema(name) for name in kind.tools] or None
    warm_start(model, tokenizer, rows, lessons, tools, seed)
    logging.disable_progress_bar()
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def write_rows(path: Path, rows: list[dict]) -> None:
    """Rows as JSON lines."""
    with open(path, "w") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")


def write_few_shot(folder: str) -> None:
    """few_shot_train.jsonl (8192 rows) and few_shot_val.jsonl (512), what configs/smollm2_arith.yaml trains on.

    Two-digit additions as plain text after four worked ones. The same rows for everyone: other systems were measured on
    them.
    """
    rng = random.Random(7)
    os.makedirs(folder, exist_ok=True)
    for split, num_rows in (("train", 8192), ("val", 512)):
        rows = []
        for _ in range(num_rows):
            *solved, (a, b) = [(rng.randint(10, 99), rng.randint(10, 99)) for _ in range(5)]
            worked = "".join(f"{x} + {y} = {x + y}\n" for x, y in solved)
            rows.append({"prompt": f"{worked}{a} + {b} =", "answer": str(a + b), "data_source": "exact_int"})
        write_rows(Path(folder, f"few_shot_{split}.jsonl"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tasks.quickstart", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tools", action="store_true", help="products, and a calculator")
    parser.add_argument("--folder", help="where to write; default: data/quickstart, with --tools data/tool_agent")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--few-shot", metavar="FOLDER", help="only write the data of configs/smollm2_arith.yaml there")
    args = parser.parse_args()
    if args.few_shot:
        write_few_shot(args.few_shot)
    else:
        folder = args.folder or ("data/tool_agent" if args.tools else "data/quickstart")
        make(folder, args.seed, args.tools)


if __name__ == "__main__":
    main()
