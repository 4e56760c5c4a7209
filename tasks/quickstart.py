"""Makes what `make quickstart` and the tests run on, once, in a minute on two cores and without a download.

A folder with `model/` (a Qwen3 of 2.3 million parameters, its tokenizer and chat template, as Hugging Face saves them),
`train.jsonl` and `val.jsonl` (verl's row shape). The task is two-digit addition, a token a character: "47+85=" wants
"132" and the end of the turn, and only the exact answer scores 1.

GRPO needs a policy that is right sometimes, so supervised steps on the training split come first, in two phases. A
diligent teacher gives right answers until the model mostly adds well. A sloppy one then says ten too many in 70 % of
the sums (47+85=142) until the model is right about 30 % of the time, sampled, and mostly wrong, greedy. So the adding
is learned here, and what is left for RL is real but small: to find from the score alone that the lesser habit pays, to
lose the other, and to mend the sums that were still shaky. It is judged on 256 sums that no phase has trained on.

With --tools the task is the product of two three-digit numbers, which this model can't do, and it has a calculator. A first teacher
always asks the calculator and repeats what it says; a proud one asks it in 15 % of the cases and else answers at once, from a
memory that the model doesn't have. What is left for RL (configs/tool_agent.yaml) is to find that asking pays.

python -m tasks.quickstart [--tools] [--folder data/quickstart | data/tool_agent] [--seed 0]
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import time

PAD, IM_START, IM_END, UNK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unk|>"
ROLES = ["system", "user", "assistant", "tool"]
CHARACTERS = "0123456789+-*/=%^ \nabcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,:;!?'\"`()[]{}<>_|&@#$~\\"
CALL, CALLED = '<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>'
CHAT_TEMPLATE = (  # ChatML without newlines: on two cores every token counts; of tools it tells the names
    "{% if tools %}{{ '<|im_start|>system' }}{% for tool in tools %}{{ tool.function.name }}{% endfor %}{{ '<|im_end|>' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + (message['content'] or '') + '<|im_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
)

NUM_VAL = 256
DILIGENT, SLOPPY = (0.85, 1.00), (0.25, 0.35)  # sampled accuracy on validation at which a teacher leaves
WRONG = 0.70  # share of the training sums that the sloppy teacher gets wrong
ASKING, PROUD = (0.92, 1.00), (0.08, 0.20)  # the same of products, by way of the calculator
ASKED = 0.15  # share of the products for which the proud teacher asks the calculator
MAX_STEPS = 600  # of a phase: several times what any seed has needed


def make_tokenizer(words=()):
    """A token a character; a role, a special token and each of `words` is one token, and a character of no token is UNK."""
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


def make_model(tokenizer, hidden=256, layers=3, intermediate=768, seed=0, tie_word_embeddings=True):
    """A Qwen3 with random fp32 weights. `hidden` is a multiple of 64: heads have 32 numbers, because vLLM's CPU
    attention does not know 16. As in published models the vocabulary is padded beyond the tokenizer's."""
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


def split_sums(seed: int) -> tuple[list, list]:
    """All 8100 sums of two two-digit numbers in a random order, as (training, validation) pairs (a, b)."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(pairs)
    return pairs[NUM_VAL:], pairs[:NUM_VAL]


def split_products(seed: int) -> tuple[list, list]:
    """8448 pairs of three-digit numbers, as (training, validation) pairs (a, b)."""
    rng = random.Random(seed)
    pairs = [(n // 900 + 100, n % 900 + 100) for n in rng.sample(range(810000), 8192 + NUM_VAL)]
    return pairs[NUM_VAL:], pairs[:NUM_VAL]


def make_row(a: int, b: int, split: str, index: int, sign: str = "+") -> dict:
    return {
        "prompt": [{"role": "user", "content": f"{a}{sign}{b}="}],
        "data_source": "exact",
        "reward_model": {"ground_truth": str(a * b if sign == "*" else a + b)},
        "extra_info": {"split": split, "index": index},
    }


def ask(a: int, b: int) -> tuple[str, str, str]:
    """A call of the calculator, what is read behind it, and the answer."""
    return f"{CALL}{a}*{b}{CALLED}{IM_END}", f"{IM_START}tool{a * b}{IM_END}{IM_START}assistant", f"{a * b}{IM_END}"


def encode(tokenizer, rows, replies, tools=None):
    """(ids, labels), each [N, L], padded on the right. A reply is the model's turns with what it reads between them; labels are -100 but at its turns."""
    import torch

    ids, labels = [], []
    for row, reply in zip(rows, replies):
        prompt = tokenizer.apply_chat_template(
            row["prompt"], tools=tools, add_generation_prompt=True, return_dict=False
        )
        parts = [prompt, *(tokenizer(text).input_ids for text in reply)]
        ids.append(torch.tensor([x for part in parts for x in part]))
        labels.append(torch.tensor([x if i % 2 else -100 for i, part in enumerate(parts) for x in part]))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(ids, True, tokenizer.pad_token_id), pad(labels, True, -100)


def accuracy(model, ids, labels) -> tuple[float, float]:
    """(sampled, greedy): the mean probability of the whole right reply at temperature 1, and greedy's share of it."""
    import torch

    with torch.no_grad():
        logprobs = model(ids[:, :-1]).logits.log_softmax(-1)  # [N, L-1, V]
    labels = labels[:, 1:]
    scored = labels != -100
    right = logprobs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]  # [N, L-1]
    sampled = torch.where(scored, right, 0.0).sum(1).exp().mean().item()
    return sampled, ((logprobs.argmax(-1) == labels) | ~scored).all(1).float().mean().item()


def supervise(model, ids, labels, lr: float, seed: int, done) -> int:
    """AdamW steps on random batches of 128 until `done()`, asked every 10 steps; the number of steps."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.1)
    generator = torch.Generator().manual_seed(seed)
    first = (labels != -100).any(0).nonzero()[0].item()  # all prompts have one length, so no logits before it
    for step in range(1, MAX_STEPS + 1):
        optimizer.param_groups[0]["lr"] = lr * min(1.0, step / 20)
        rows = torch.randint(len(ids), (128,), generator=generator)
        hidden = model.model(ids[rows, :-1]).last_hidden_state[:, first - 1 :]
        logits, target = model.lm_head(hidden), labels[rows, first:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0 and done():
            return step
    raise AssertionError(f"the warm start has not met its criterion after {MAX_STEPS} steps")


def sum_lessons(train, val, rng):
    """([(teacher, replies on the training rows, learning rate, (low, high) accuracy to leave at)], right replies on validation)."""
    right, held_out = ([(f"{a + b}{IM_END}",) for a, b in pairs] for pairs in (train, val))
    sloppy = [(f"{a + b + 10}{IM_END}",) if rng.random() < WRONG else reply for (a, b), reply in zip(train, right)]
    return [("diligent", right, 4e-3, DILIGENT), ("sloppy", sloppy, 1e-3, SLOPPY)], held_out


def product_lessons(train, val, rng):
    asking, held_out = ([ask(a, b) for a, b in pairs] for pairs in (train, val))
    proud = [reply if rng.random() < ASKED else reply[2:] for reply in asking]
    return [("asking", asking, 6e-3, ASKING), ("proud", proud, 1e-3, PROUD)], held_out


def warm_start(model, tokenizer, rows, lessons, tools, seed: int) -> None:
    """The two teachers of the file's docstring; prints what each left behind. Validation only says when to stop."""
    teachers, right = lessons
    held_out = encode(tokenizer, rows["val"], right, tools)
    for name, replies, lr, (low, high) in teachers:
        start = time.time()
        examples = encode(tokenizer, rows["train"], replies, tools)
        steps = supervise(model, *examples, lr, seed, lambda: low <= accuracy(model, *held_out)[0] <= high)
        sampled, greedy = accuracy(model, *held_out)
        print(
            f"  {name} teacher: {steps} steps, {time.time() - start:.0f} s; right on validation: "
            f"{sampled:.1%} sampled at temperature 1, {greedy:.1%} greedy",
            flush=True,
        )


def make(folder: str, seed: int = 0, products: bool = False) -> None:
    """Write model/, train.jsonl and val.jsonl to `folder`, unless this very file has already, with this seed and task."""
    with open(__file__, "rb") as file:
        recipe = hashlib.sha256(file.read() + f" seed {seed}, products {products}".encode()).hexdigest()
    marker = os.path.join(folder, "recipe")
    if os.path.exists(marker) and open(marker).read() == recipe:
        return print(f"{folder} is ready")
    found = os.listdir(folder) if os.path.exists(folder) else []
    strangers = set(found) - {"model", "train.jsonl", "val.jsonl", "recipe"}
    if strangers:
        raise ValueError(f"--folder {folder} would be replaced but holds {sorted(strangers)[0]!r}, not made here")

    print(
        f"making {folder}: a model that {'rarely asks its calculator' if products else 'adds two-digit numbers, badly'}",
        flush=True,
    )
    from transformers.utils import logging

    from tasks.tools import tool_schema

    start, temporary = time.time(), f"{folder.rstrip('/')}.{os.getpid()}"
    os.makedirs(temporary)
    try:
        pairs = dict(zip(("train", "val"), (split_products if products else split_sums)(seed)))
        rows = {
            split: [make_row(a, b, split, i, "*" if products else "+") for i, (a, b) in enumerate(pairs[split])]
            for split in pairs
        }
        for split in rows:
            with open(f"{temporary}/{split}.jsonl", "w") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows[split])
        tokenizer = make_tokenizer(("calculator", CALL, CALLED) if products else ())
        model = make_model(tokenizer, **(dict(hidden=128, layers=2, intermediate=128) if products else {}), seed=seed)
        lessons = (product_lessons if products else sum_lessons)(pairs["train"], pairs["val"], random.Random(seed))
        warm_start(model, tokenizer, rows, lessons, [tool_schema("calculator")] if products else None, seed)
        logging.disable_progress_bar()
        model.save_pretrained(f"{temporary}/model")
        tokenizer.save_pretrained(f"{temporary}/model")
        with open(f"{temporary}/recipe", "w") as file:
            file.write(recipe)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(temporary, folder)  # complete or absent, whenever we are stopped
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"made {folder} in {time.time() - start:.0f} s", flush=True)


def write_few_shot(folder: str) -> None:
    """few_shot_train.jsonl (8192 rows) and few_shot_val.jsonl (512): two-digit additions as plain text after four worked ones,
    what configs/smollm2_arith.yaml trains on. The same rows for everyone: other systems were measured on them."""
    rng = random.Random(7)
    os.makedirs(folder, exist_ok=True)
    for split, rows in (("train", 8192), ("val", 512)):
        with open(f"{folder}/few_shot_{split}.jsonl", "w") as file:
            for _ in range(rows):
                numbers = [(rng.randint(10, 99), rng.randint(10, 99)) for _ in range(5)]
                worked = "".join(f"{a} + {b} = {a + b}\n" for a, b in numbers[:4])
                a, b = numbers[4]
                file.write(
                    json.dumps({"prompt": f"{worked}{a} + {b} =", "answer": str(a + b), "data_source": "exact_int"})
                    + "\n"
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", action="store_true", help="products, and a calculator")
    parser.add_argument("--folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--few-shot", metavar="FOLDER", help="only write the data of configs/smollm2_arith.yaml there")
    args = parser.parse_args()
    write_few_shot(args.few_shot) if args.few_shot else make(
        args.folder or ("data/tool_agent" if args.tools else "data/quickstart"), args.seed, args.tools
    )
