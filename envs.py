"""A toy coding environment: repair a small Python function with tools, over several turns.

    user:      def f(x): return (x * 3) - 5
               This is wrong. f must take x, multiply by 2, then add 5. Answer with ...
    assistant: a little reasoning, then the function in a ``` block (the habit; it works)
               or between <patch> and </patch> (the tool format that is wanted)
    user:      1 of 3 tests pass. Try again.  |  3 of 3 tests pass. Write a one-line commit message.
    assistant: Fixed it.  (the habit)         |  fix(f): multiply by 2, then add 5  (wanted)

An episode has one or two edit turns, then the commit turn; its success is that the hidden tests
pass. Both formats and any message work: the `BEHAVIOURS` are neglected, not punished.

What the model writes is never executed by Python. `run_function` walks its syntax tree and knows
numbers, names, arithmetic, assignment and return, which is all that a repair needs. There are no
loops and no calls, so it takes a step per node of the tree at most.

    python envs.py [SEED]    plays one scripted episode
"""
import ast
import json
import operator
import random
import re
import sys
import textwrap
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

MAX_EDITS = 2  # edit attempts per episode; one commit turn follows
MAX_REPLY = 10_000  # characters of a reply that the parser looks at
MAX_SOURCE = 2_000  # characters of a function: this bounds the interpreter's time as well
MAX_BITS = 256  # of a computed integer
HELD_OUT = 1_000_000  # seeds from here on give the held-out tasks

# ------------------------------------------------------------------------------------- tasks
SYMBOLS = {"add": "+", "subtract": "-", "multiply by": "*"}
Steps = tuple[tuple[str, int], tuple[str, int]]  # (("multiply by", 2), ("add", 5))


@dataclass(frozen=True)
class Task:
    name: str  # of the function
    arg: str
    steps: Steps  # what the function must do
    bug: Steps  # what it does
    inputs: tuple[int, ...]  # of the hidden tests
    wording: str = "plain"  # of the request; tags: it names the tool format; other: other words

    @property
    def spec(self) -> str:
        return ", then ".join(f"{word} {k}" for word, k in self.steps)

    def source(self, steps: Steps) -> str:
        (first, a), (second, b) = steps
        body = f"({self.arg} {SYMBOLS[first]} {a}) {SYMBOLS[second]} {b}"
        return f"def {self.name}({self.arg}): return {body}"


def random_steps(rng: random.Random) -> Steps:
    return tuple((rng.choice(list(SYMBOLS)), rng.randint(2, 9)) for _ in range(2))


def follow(steps: Steps, x: int) -> int:
    for word, k in steps:
        x = x + k if word == "add" else x - k if word == "subtract" else x * k
    return x


def mistake(steps: Steps, rng: random.Random) -> Steps:
    """The steps with one operator or number replaced; they agree for one input at most."""
    changed, i = list(steps), rng.randrange(2)
    word, k = steps[i]
    if rng.random() < 0.5:
        changed[i] = rng.choice([w for w in SYMBOLS if w != word]), k
    else:
        changed[i] = word, rng.choice([n for n in range(2, 10) if n != k])
    return tuple(changed)


def make_task(seed: int, wording: str = "plain") -> Task:
    """The task of this seed. Training and held-out seeds also differ in the steps themselves:
    those whose two numbers add up to a multiple of five are never trained on."""
    rng = random.Random(seed)
    steps = random_steps(rng)
    while (sum(k for _, k in steps) % 5 == 0) != (seed >= HELD_OUT):
        steps = random_steps(rng)
    inputs = tuple(rng.sample(range(-9, 10), 3))
    bug = random_steps(rng)
    while all(follow(bug, x) == follow(steps, x) for x in inputs):
        bug = random_steps(rng)
    return Task(rng.choice("fgh"), rng.choice("xyn"), steps, bug, inputs, wording)


# ------------------------------------------------- the safe interpreter for model-written code
class Refused(Exception):
    """The reply cannot be used; the message becomes the agent's observation."""


OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
             ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
             ast.USub: operator.neg, ast.UAdd: operator.pos}


def value_of(node: ast.expr, names: dict):
    """The value of an expression: a number or a truth value. Raises Refused for anything else."""
    match node:
        case ast.Constant(value=bool() | int() | float() as value):
            return value
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            value = OPERATORS[type(op)](value_of(left, names), value_of(right, names))
            if isinstance(value, int) and value.bit_length() > MAX_BITS:
                raise Refused("a number became too large")
            return value
        case ast.UnaryOp(op, operand) if type(op) in OPERATORS:
            return OPERATORS[type(op)](value_of(operand, names))
    raise Refused(f"{ast.unparse(node)[:50]} is not supported here")


def run_function(function: ast.FunctionDef, x: int):
    """What the function returns for x. Raises Refused for whatever goes wrong inside it."""
    argument, = function.args.posonlyargs + function.args.args
    names = {argument.arg: x}
    try:
        for statement in function.body:
            match statement:
                case ast.Return(value):
                    return None if value is None else value_of(value, names)
                case ast.Assign([ast.Name(id=name)], value):
                    names[name] = value_of(value, names)
                case ast.AugAssign(ast.Name(id=name) as target, op, value):
                    names[name] = value_of(ast.BinOp(target, op, value), names)
                case ast.Pass() | ast.Expr(ast.Constant(value=str())):  # a docstring
                    pass
                case _:
                    raise Refused(f"{type(statement).__name__} is not supported here")
    except (ArithmeticError, TypeError, ValueError, RecursionError) as error:
        raise Refused(f"{type(error).__name__}: {error}") from None


# --------------------------------------------------------------------------- reading a reply
FENCED = re.compile(r"```(?:[ \t]*[\w.+#-]*[ \t]*\n)?(.*?)```", re.DOTALL)  # without language tag


def read_patch(reply: str) -> str | None:
    """The code between the tags, None without tags. Raises Refused if unclosed or repeated."""
    start, end = reply.find("<patch>"), reply.find("</patch>")
    if start == end == -1:
        return None
    if not reply.count("<patch>") == reply.count("</patch>") == 1 or end < start:
        raise Refused("the reply needs one <patch> and one </patch> after it")
    return reply[start + len("<patch>"):end]


def read_edit(task: Task, reply: str) -> tuple[ast.FunctionDef, bool]:
    """(the function that the reply defines, whether it came in the <patch> format).

    With patch tags, their content counts, fenced or not; without, the last closed ``` block does;
    without that, the whole reply. Anything else around the function is ignored. Raises Refused."""
    if len(reply) > MAX_REPLY:
        raise Refused("the reply is too long")
    patch = read_patch(reply)
    text = reply if patch is None else patch
    source = textwrap.dedent((FENCED.findall(text) or [text])[-1]).strip()
    if len(source) > MAX_SOURCE:
        raise Refused("the code is too long")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a model's odd literals are not the user's concern
            tree = ast.parse(source)
            compile(tree, "reply", "exec")  # not run: it finds more errors, such as a stray break
    except SyntaxError as error:
        raise Refused(f"SyntaxError: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError):  # NUL, surrogates; nesting
        raise Refused("the code cannot be parsed") from None
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == task.name]
    if not functions:
        raise Refused(f"the code does not define {task.name}")
    arguments = functions[-1].args
    if len(arguments.posonlyargs + arguments.args) != 1 or arguments.kwonlyargs:
        raise Refused(f"{task.name} must take one argument")
    return functions[-1], patch is not None


# ------------------------------------------------------------------ behaviours and judges
def uses_patch(task: Task, reply: str) -> bool:
    try:
        return read_edit(task, reply)[1]
    except Refused:
        return False


def uses_style(task: Task, reply: str) -> bool:
    subject = reply.strip().partition("\n")[0]
    return re.fullmatch(rf"fix\({task.name}\): \w.{{0,100}}", subject) is not None


@dataclass(frozen=True)
class Behaviour:
    name: str
    kind: str  # the turns that it applies to: "edit" or "commit"
    check: Callable[[Task, str], bool]
    rule: Callable[[Task], str]  # what a judge that is a language model is told
    hint: Callable[[Task], str]  # says how to improve this turn; never a hidden expected value


# Wording decides: these were measured with Qwen2.5-Coder-0.5B (tags) and on the embedded base.
BEHAVIOURS = (
    Behaviour("patch", "edit", uses_patch,
              lambda task: "The code must stand between <patch> and </patch>.",
              lambda task: "Start your code with <patch> and end it with </patch>."
              if task.wording == "tags" else "Wrap your answer in <patch> and </patch> tags."),
    Behaviour("style", "commit", uses_style,
              lambda task: f"The message must begin with fix({task.name}): ",
              lambda task: f"Use the format fix({task.name}): what changed"),
)


def shown(task: Task, kind: str, reply: str) -> dict[str, bool]:
    """Which of the behaviours that apply to a turn of this kind the reply shows."""
    return {b.name: b.check(task, reply) for b in BEHAVIOURS if b.kind == kind}


def hints(task: Task, kind: str, reply: str | None = None) -> str | None:
    """What the rule judge says: a hint for each behaviour that the reply lacks, None if none.
    Without a reply, every hint for a turn of this kind."""
    return " ".join(b.hint(task) for b in BEHAVIOURS if b.kind == kind
                    and (reply is None or not b.check(task, reply))) or None


def with_hint(messages: list[dict], hint: str | None) -> list[dict]:
    """The hint joins the last message: one of its own would break strict chat templates."""
    if not hint:
        return messages
    return [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}\n{hint}"}]


JUDGE_PROMPT = """You check replies against a rule.
Rule: RULE
Answer GOOD if the reply follows the rule. If it breaks the rule, answer HINT: and repeat the rule.

Reply:
REPLY"""


def read_verdict(answer: str) -> str | None:
    """None for GOOD, the hint of a line HINT: ..., "" for anything else or over 200 letters. A code
    fence around the answer and a word before it (Verdict:, Answer:) are read over."""
    verdict = re.fullmatch(r"(?:```\w*)?\s*(?:(?:verdict|answer)\s*:\s*)?"
                           r"(?:(GOOD)[.!]?|HINT:[ \t]*(\S[^\n]{0,199}?))\s*(?:```)?",
                           answer.strip(), re.IGNORECASE)
    return "" if not verdict else None if verdict[1] else verdict[2].strip()


# ------------------------------------------------------------------------------- the episode
class Repair:
    """One episode: `first_message`, then `step` for each reply until it returns None."""

    def __init__(self, task: Task):
        self.task, self.kind, self.edits, self.success = task, "edit", 0, False

    def first_message(self) -> str:
        name, arg, spec = self.task.name, self.task.arg, self.task.spec
        source = self.task.source(self.task.bug)
        if self.task.wording == "other":
            return f"Repair {name}: it should take {arg}, {spec}. Now it is\n{source}"
        tags = ", in a ``` code block (or in <patch> tags)" if self.task.wording == "tags" else ""
        return (f"{source}\nThis is wrong. {name} must take {arg}, {spec}. "
                f"Answer with the whole fixed function{tags}.")

    def step(self, reply: str) -> str | None:
        """The user's next message, None when the episode is over. No reply can make it raise."""
        if self.kind == "commit":
            return None
        self.edits += 1
        try:
            function, _ = read_edit(self.task, reply)
            wanted = [follow(self.task.steps, x) for x in self.task.inputs]
            passed = [run_function(function, x) == y for x, y in zip(self.task.inputs, wanted)]
            observation = f"{sum(passed)} of {len(passed)} tests pass."
            self.success = all(passed)
        except Refused as error:
            observation = f"Error: {str(error)[:100]}."
        if self.success or self.edits == MAX_EDITS:
            self.kind = "commit"
            return (f"{observation} Describe your change in a line." if self.task.wording == "other"
                    else f"{observation} Write a one-line commit message.")
        return f"{observation} Try again."


# ------------------------------------------------------------------------ the scripted expert
HABITS = ("Fixed the function!", "Fixed it.", "The function works now.", "Bug fixed!")
WRONG = (0.85, 0.70, 0.55)  # of edits after 0, 1, 2 sentences of reasoning: thinking helps


def expert(env: Repair, rng: random.Random, wanted: bool, wrong=WRONG) -> str:
    """The next reply: in the wanted format and style or in the habitual one, as often right."""
    task = env.task
    if env.kind == "commit":
        return f"fix({task.name}): {task.spec}" if wanted else rng.choice(HABITS)
    sentences = rng.randrange(3)
    (first, a), (second, b) = task.steps
    reasoning = (f"First {first} {a}.", f"Then {second} {b}.")[:sentences]
    steps = mistake(task.steps, rng) if rng.random() < wrong[sentences] else task.steps
    code = task.source(steps)
    return "\n".join([*reasoning, f"<patch>\n{code}\n</patch>" if wanted else f"```\n{code}\n```"])


def demonstration(rng: random.Random, pretraining: bool) -> list[dict]:
    """A conversation with an expert, as messages; its last one is the expert's.

    In pre-training half of the turns carry a hint, half of the others show the wanted behaviour
    too, and mistakes are few; later three in ten carry one, the others show the habit only. Hinted
    turns comply at a rate of 0.98. As in the teacher's view, the turns before carry no hint. A
    quarter asks in the words that FSD is never trained on: does what it teaches carry over?"""
    env = Repair(make_task(rng.randrange(HELD_OUT), "other" if rng.random() < 0.25 else "plain"))
    hinted, unasked, wrong = (0.5, 0.5, (0.1,) * 3) if pretraining else (0.3, 0.0, WRONG)
    messages = [{"role": "user", "content": env.first_message()}]
    while env.kind == "edit" and rng.random() < 0.6:
        reply = expert(env, rng, rng.random() < unasked, wrong)
        messages += [{"role": "assistant", "content": reply},
                     {"role": "user", "content": env.step(reply)}]
    hint = hints(env.task, env.kind) if rng.random() < hinted else None
    reply = expert(env, rng, rng.random() < (0.98 if hint else unasked), wrong)
    return [*with_hint(messages, hint), {"role": "assistant", "content": reply}]


# ---------------------------------------------------------------------------- the embedded base
# A stand-in for a post-trained language model: it solves the task sometimes, follows hints, and
# never shows the behaviours unasked. Pre-training (a share of the steps) teaches it both formats,
# post-training leaves the habitual one.
BASE = dict(seed=0, steps=560, pretraining=0.5, batch=32, lr=3e-3, vocab=512, hidden_size=128,
            intermediate_size=384, num_hidden_layers=3, num_attention_heads=4,
            max_position_embeddings=512, initializer_range=0.08, tie_word_embeddings=True)
TEMPLATE = ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}")


def base_demonstrations() -> list[list[list[dict]]]:
    """A batch of conversations per training step; the last message is the expert's."""
    rng = random.Random(BASE["seed"])
    return [[demonstration(rng, pretraining=step < BASE["pretraining"] * BASE["steps"])
             for _ in range(BASE["batch"])] for step in range(BASE["steps"])]


def base_tokenizer(texts: list[str]) -> transformers.PreTrainedTokenizerFast:
    """Byte-pair encoding that never merges across words or symbols: new code splits alike."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"```| ?\w+| ?[^\w\s]|\s"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=BASE["vocab"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"], show_progress=False))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<|pad|>", eos_token="<|end|>", chat_template=TEMPLATE)


def train_base(batches: list[list[list[dict]]], device: str):
    """(model, tokenizer): a small Llama, trained to predict every token of the demonstrations."""
    torch.manual_seed(BASE["seed"])
    tokenizer = base_tokenizer([m["content"] for batch in batches[::10] for d in batch for m in d])
    sizes = {name: value for name, value in BASE.items() if "_" in name}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, **sizes)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=BASE["lr"], betas=(0.9, 0.95))
    for step, batch in enumerate(tqdm(batches, "training the base", disable=None, ncols=80)):
        warmup, decay = (step + 1) / 20, 4 * (1 - step / BASE["steps"])
        optimizer.param_groups[0]["lr"] = BASE["lr"] * min(1, warmup, decay)
        rows = tokenizer.apply_chat_template(batch, padding=True, return_tensors="pt",
                                             return_dict=True).to(device)
        labels = rows.input_ids.masked_fill(rows.attention_mask == 0, -100)
        optimizer.zero_grad()
        model(**rows, labels=labels).loss.backward()
        optimizer.step()
    return model, tokenizer


def embedded_base(folder: str, device: str) -> str:
    """The folder of the base: trained at first, then reused until the recipe changes."""
    batches, stamp = base_demonstrations(), Path(folder) / "made_with.json"
    made_with = json.dumps([BASE, TEMPLATE, batches[-1]])  # the last depends on all before
    reused = stamp.exists() and stamp.read_text() == made_with
    print(f"base model: {'reusing' if reused else 'a minute or two of training for'} {folder}")
    if not stamp.exists() and Path(folder, "config.json").exists():
        raise SystemExit(f"--base {folder}: holds another model; an empty folder, or --model")
    if not reused:
        stamp.write_text("")
        for part in train_base(batches, device):
            part.save_pretrained(folder)
        stamp.write_text(made_with)  # last: that of a half-saved base is empty
    return folder


if __name__ == "__main__":
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    rng, env = random.Random(seed), Repair(make_task(seed))
    message = env.first_message()
    while message:
        reply = expert(env, rng, wanted=rng.random() < 0.5)
        for who, text in (("user:", message), ("assistant:", reply)):
            print(f"{who:<11}" + text.replace("\n", "\n" + " " * 11))
        print(f"judge:     {hints(env.task, env.kind, reply) or 'a good turn, no hint'}")
        message = env.step(reply)
    print(f"success:   {env.success}")
