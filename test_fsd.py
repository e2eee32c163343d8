"""The claims of the method and of this code, each as a test. Offline, on the CPU, in a few minutes.

A test's name is the claim; its docstring says why the bug would be silent."""
import os

os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")  # before torch and transformers start

import copy
import json
import math
import random
import re
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Categorical, kl_divergence
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import envs
import fsd

torch.set_num_threads(1)  # tiny models; two threads crawl when the cores are busy

STRICT = ("{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
          "{{ raise_exception('roles must alternate, starting with user') }}{% endif %}"
          "<|{{ m.role }}|>{{ m.content | trim }}<|end|>{% endfor %}"
          "{% if add_generation_prompt %}<|assistant|>{% endif %}")
TASK = envs.Task("f", "x", (("multiply by", 2), ("add", 5)), (("multiply by", 3), ("subtract", 5)), (1, 2, 3))
RIGHT = "def f(x): return (x * 2) + 5"


@pytest.fixture(scope="session")
def tokenizer():
    rng = random.Random(0)
    demonstrations = [envs.demonstration(rng, True) for _ in range(300)]
    return fsd.base_tokenizer([m["content"] for d in demonstrations for m in fsd.with_hint(*d[:2])]
                              + [d[2] for d in demonstrations])


@pytest.fixture(params=["llama", "gpt2"])
def policy(request, tokenizer):
    """Tiny random models: rotary positions hide position bugs, and only GPT-2 has dropout."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=len(tokenizer) + 5, bos_token_id=None, eos_token_id=tokenizer.eos_token_id)
    if request.param == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=700, **sizes))
    else:
        model = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                             num_attention_heads=2, max_position_embeddings=700, **sizes))
    for p in model.parameters():
        p.data.mul_(4)  # a peaked distribution: errors of position and mask become large
    return fsd.Policy(model.eval(), tokenizer, temperature=0.7, max_tokens=12)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def logprobs_of(policy, prompt, ids):
    """Oracle: one unpadded row through the whole model, by torch.distributions. (N,)"""
    with torch.no_grad():
        logits = policy.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1:-1]
    return Categorical(logits=logits / policy.temperature).log_prob(torch.tensor(ids))


def make_turn(policy, text="Fixed it.", kind="commit", advantage=0.0, hint=None, messages=None, sample_from=None):
    messages = messages or [{"role": "user", "content": "a b c"}]
    ids = policy.tokenizer.encode(text) + policy.stop_ids
    prompt = fsd.render(policy, messages)
    turn = fsd.Turn(TASK, kind, messages, prompt, ids, logprobs_of(policy, prompt, ids).tolist(), [1.0] * len(ids),
                    False, text, envs.shown(TASK, kind, text), advantage=advantage)
    if hint is not None:
        turn.hint, turn.hinted_prompt = hint, fsd.render(policy, messages, hint)
    return turn


def gradient(policy, teacher, turns, **settings):
    """The gradient that `update` computes, as one vector, and its statistics."""
    cfg = fsd.Config(temperature=policy.temperature, **settings)
    optimizer = torch.optim.SGD(policy.model.parameters(), lr=0.0)
    clip, torch.nn.utils.clip_grad_norm_ = torch.nn.utils.clip_grad_norm_, lambda *_: torch.tensor(0.0)
    try:
        stats = fsd.update(policy, teacher, optimizer, turns, cfg)
    finally:
        torch.nn.utils.clip_grad_norm_ = clip
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten()
                      for p in policy.model.parameters()]), stats


# ------------------------------------------------------------------------------------ environment
def test_tasks_are_functions_of_their_seed_and_held_out_steps_are_never_trained_on():
    train = [envs.make_task(s) for s in range(400)]
    held_out = [envs.make_task(envs.HELD_OUT + s) for s in range(400)]
    assert train == [envs.make_task(s) for s in range(400)]
    assert not {t.steps for t in train} & {t.steps for t in held_out}
    assert len({t.steps for t in held_out}) > 50


def test_the_interpreter_agrees_with_python():
    """Oracle: Python itself, on sources that we wrote. A wrong interpreter would reward wrong code."""
    bodies = ["return (x * 3) - 5", "y = x + 1\n    y *= 2\n    return y", "return -x if x > 0 else abs(x) // 2",
              "if x < 0 and not x == -3:\n        return 1\n    elif x % 2:\n        return 2\n    return x ** 2",
              "'doc'\n    return max(x, 2, min(x, 1)) + int(7 / 2)", "return 1 < x <= 4 or x", "pass"]
    for body in bodies:
        source, names = f"def f(x: int) -> int:\n    {body}\n", {}
        exec(source, names)
        function, _ = envs.read_edit(TASK, f"```python\n{source}```")
        for x in range(-5, 6):
            assert envs.run_function(function, x) == names["f"](x), (body, x)


HOSTILE = ["9**9**9", "x" + "*x" * 900, "(" * 900 + "x" + ")" * 900, "-" * 1900 + "x", "[" * 500, "f(x)", "1e999 // 1",
           "__import__('os').system('exit')", "().__class__", "open('/etc/passwd')", "'a' * 10**9", "[0] * 10**9",
           "int('9' * 9)", "10 ** -10 ** 10", "(-8) ** 0.5", "int(1e308 * 10)", "1 << 10**9", "x\x00", "x \ud800", "lambda: x",
           "0x" + "f" * 1500, "min()", "max(x)", "int(x, 2)", "abs(x=1)", "(x := 10**9)", "f'{x}'", "1 % 0", "undefined",
           "x\n    while True: pass", "x\n    global f", "x" + " + x" * 2_000_000]


@pytest.mark.parametrize("i", range(len(HOSTILE)))
@pytest.mark.parametrize("frame", ["```\ndef f(x): return {}\n```", "<patch>def f(x):\n  while 1: {}</patch>", "{}"])
def test_nothing_a_model_writes_raises_hangs_or_changes_the_trainer(i, frame):
    env, start = envs.Repair(TASK), time.perf_counter()
    text = frame.replace("{}", HOSTILE[i])
    observation = env.step(text)
    assert 0 < len(observation) < 200 and time.perf_counter() - start < 2
    assert not env.success and envs.hints(TASK, "commit", text)
    assert envs.Repair(TASK).step(f"```\n{RIGHT}\n```").startswith("3 of 3") and abs(-1) == 1


@pytest.mark.parametrize("reply, observation, in_format", [
    (f"<patch>\n{RIGHT}\n</patch>", "3 of 3", True),
    (f"So:\n<patch>\n```python\n    {RIGHT}\n```\n</patch> Done.", "3 of 3", True),
    (f"```python\n{RIGHT}\n```", "3 of 3", False),
    (f"```{RIGHT}```", "3 of 3", False),
    (f"```\nold()\n```\nthen\n```\n{RIGHT}\n```", "3 of 3", False),  # the last block counts
    (f"<patch>\n{RIGHT.replace('2', '7')}\n</patch>", "0 of 3", True),  # a wrong edit in the right format
    (f"<patch>\n{RIGHT}", "Error: the reply needs one <patch>", False),
    (f"<patch><patch>{RIGHT}</patch></patch>", "Error: the reply needs one <patch>", False),
    (f"<patch>{RIGHT}</patch><patch>{RIGHT}</patch>", "Error: the reply needs one <patch>", False),
    ("<patch></patch>", "Error: the code does not define f", False),
    ("<patch>def f(x) return</patch>", "Error: SyntaxError", False),
    (f"<patch>{RIGHT.replace('f(', 'g(')}</patch>", "Error: the code does not define f", False),
    ("<patch>def f(x, y): return x</patch>", "Error: f must take one argument", False),
    (RIGHT, "Error: the reply has no code block", False),
    ("", "Error: the reply has no code block", False)])
def test_odd_tool_calls_have_a_documented_meaning(reply, observation, in_format):
    assert envs.Repair(TASK).step(reply).startswith(observation)
    assert envs.shown(TASK, "edit", reply) == {"patch": in_format}


def test_both_formats_work_and_the_episode_ends_after_the_commit_message():
    """Behaviours are neglected, not punished: success may not depend on them."""
    for edit, message in ((f"```\n{RIGHT}\n```", "Fixed it."), (f"<patch>{RIGHT}</patch>", "fix(f): double, add 5")):
        env = envs.Repair(TASK)
        assert env.step("no code") == "Error: the reply has no code block. Try again."
        assert env.step(edit) == "3 of 3 tests pass. Write the commit message."
        assert env.step(message) is None and env.success
    env = envs.Repair(TASK)
    for _ in range(envs.MAX_EDITS):
        last = env.step("no code")
    assert last.endswith("Write the commit message.") and env.step("x") is None and not env.success


def test_a_hint_speaks_of_its_own_turn_and_a_good_turn_gets_none():
    assert "<patch>" in envs.hints(TASK, "edit", "junk") and "fix(" not in envs.hints(TASK, "edit", "junk")
    assert "fix(f): " in envs.hints(TASK, "commit", "junk") and "patch" not in envs.hints(TASK, "commit", "junk")
    assert envs.hints(TASK, "edit", f"<patch>{RIGHT}</patch>") is None
    assert envs.hints(TASK, "commit", "fix(f): double x") is None
    for bad in ("fix(g): double x", "fix(f):", "Done. fix(f): x", "fix(f): " + "x" * 90):
        assert envs.hints(TASK, "commit", bad)
    assert not re.search(r"\d", envs.hints(TASK, "edit", "") + envs.hints(TASK, "commit", ""))  # no expected value


def test_demonstrations_do_not_build_the_outcome_in():
    """With and without a hint the expert's edits are as often right, and its reasoning is as long."""
    rng, right, lines = random.Random(1), {True: [], False: []}, {True: [], False: []}
    for _ in range(6000):
        messages, hint, reply = envs.demonstration(rng, pretraining=False)
        if "commit message" in messages[-1]["content"]:
            assert hint or not reply.startswith("fix(")
            continue
        assert hint or "<patch>" not in reply
        spec = re.search(r"must take \w, (.*?)\. Answer", messages[0]["content"])[1]
        words = [(w, int(k)) for w, k in re.findall(r"([a-z]+(?: by)?) (\d)", spec.replace("then ", ""))]
        (a, i), (b, j) = words
        right[hint is not None].append(f"{envs.SYMBOLS[a]} {i}) {envs.SYMBOLS[b]} {j}" in reply)
        lines[hint is not None].append(reply.count("\n"))
    assert abs(fsd.mean(right[True]) - fsd.mean(right[False])) < 0.04
    assert abs(fsd.mean(lines[True]) - fsd.mean(lines[False])) < 0.08


# ------------------------------------------------------------------------------ tokens and template
def test_the_sampled_ids_are_kept_and_scored_as_sampled(policy, monkeypatch):
    """A model may spell a word letter by letter. Re-encoding would merge it and train on other tokens."""
    letters = [policy.tokenizer.encode(c)[0] for c in "Fixed"]
    half = [policy.tokenizer.encode("é")[0]]  # half a character: three ids after a round trip
    ids = letters + half + policy.stop_ids
    monkeypatch.setattr(fsd, "sample", lambda _, prompts, __: [(ids, [0.0] * len(ids), [0.0] * len(ids))] * len(prompts))
    turn = fsd.rollout(policy, [TASK], 1, generator())[0].turns[0]
    assert turn.ids == ids != policy.tokenizer.encode(turn.text) + policy.stop_ids
    assert fsd.score(policy.model, [turn.prompt], [turn.ids]).shape == (7, policy.model.config.vocab_size)


@pytest.mark.parametrize("template", [fsd.TEMPLATE, STRICT])
def test_contexts_are_the_templates_own_rendering_and_hints_add_no_message(policy, template, monkeypatch):
    monkeypatch.setattr(policy.tokenizer, "chat_template", template)
    for turn in (t for e in fsd.rollout(policy, [TASK], 3, generator()) for t in e.turns):
        text = policy.tokenizer.apply_chat_template(turn.messages, tokenize=False, add_generation_prompt=True)
        assert turn.prompt == policy.tokenizer.encode(text, add_special_tokens=False)
        fsd.attach_hints(policy, [turn], fsd.rule_judge)
        ask = "<|end|><|assistant|>"
        assert policy.tokenizer.decode(turn.hinted_prompt) == text.removesuffix(ask) + f"\n{turn.hint}" + ask


# ----------------------------------------------------------------------------- sampling and scoring
def test_samplers_logprobs_are_the_scorers_at_any_padding_and_temperature(policy):
    """Ratio 1 before the first update, against an oracle that knows neither batch nor padding."""
    prompts = [policy.tokenizer.encode("a b c d e f g h"[:n]) for n in (1, 15, 4, 9)]
    for policy.temperature in (0.5, 1.0, 1.7):
        replies = fsd.sample(policy, prompts, generator())
        logits = fsd.score(policy.model, prompts, [ids for ids, _, _ in replies])
        ids = torch.tensor([i for r in replies for i in r[0]])
        scored = F.log_softmax(logits / policy.temperature, -1).gather(1, ids[:, None])[:, 0]
        oracle = torch.cat([logprobs_of(policy, p, r[0]) for p, r in zip(prompts, replies)])
        assert torch.allclose(torch.tensor([x for r in replies for x in r[1]]), oracle, atol=1e-4)
        assert torch.allclose(scored, oracle, atol=1e-4)
        entropy = Categorical(logits=logits / policy.temperature).entropy()
        assert torch.allclose(torch.tensor([x for r in replies for x in r[2]]), entropy, atol=1e-3)


def test_sample_draws_from_the_softmax_whatever_the_padding_id(policy):
    """Frequencies of 4000 draws behind a padded prompt, with the pad id equal to the stop id."""
    policy.tokenizer = copy.deepcopy(policy.tokenizer)
    policy.tokenizer.pad_token, policy.max_tokens = policy.tokenizer.eos_token, 1
    prompt, long = policy.tokenizer.encode("a b"), policy.tokenizer.encode("a b c d e f")
    replies = fsd.sample(policy, [long] + [prompt] * 4000, generator())
    counts = torch.bincount(torch.tensor([r[0][0] for r in replies[1:]]), minlength=policy.model.config.vocab_size)
    p = (policy.model(torch.tensor([prompt])).logits[0, -1] / policy.temperature).softmax(-1)
    assert (counts / 4000 - p).abs().sum() / 2 < 0.5 * math.sqrt(len(p) / 4000)


def test_finished_rows_leave_the_batch_and_the_order_is_kept(policy, monkeypatch):
    widths, forward = [], type(policy.model).forward
    monkeypatch.setattr(type(policy.model), "forward",
                        lambda self, *ids, **kw: widths.append(len(kw.get("input_ids", ids))) or forward(self, *ids, **kw))
    stop = set(policy.stop_ids) | set(range(0, policy.model.config.vocab_size, 3))  # a third of all draws
    monkeypatch.setattr(fsd.Policy, "stop_ids", sorted(stop))
    prompts = [policy.tokenizer.encode(c) for c in "abcdefghijklmnop"]
    replies = fsd.sample(policy, prompts, generator())
    assert widths[0] == 16 and widths[-1] < 8
    for prompt, (ids, logprobs, _) in zip(prompts, replies):
        assert not stop & set(ids[:-1])
        assert torch.allclose(torch.tensor(logprobs), logprobs_of(policy, prompt, ids), atol=1e-4)


def test_scores_have_no_dropout_and_the_mode_is_restored(policy):
    policy.model.train()
    prompt, ids = policy.tokenizer.encode("a b"), policy.tokenizer.encode("c d")
    first = fsd.score(policy.model, [prompt], [ids])
    assert torch.equal(first, fsd.score(policy.model, [prompt], [ids])) and policy.model.training
    fsd.sample(policy, [prompt], generator())
    assert policy.model.training


def test_degenerate_turns_work(policy, monkeypatch):
    """Only a stop token; cut inside a code block; a context that is full; nothing failed."""
    stop, fence = policy.stop_ids, policy.tokenizer.encode("```\ndef f(")
    script = iter([stop, fence, stop])
    real_sample = fsd.sample
    monkeypatch.setattr(fsd, "sample", lambda _, prompts, __: [(ids, [0.0] * len(ids), [0.0] * len(ids))
                                                              for ids in [next(script)] * len(prompts)])
    turns = fsd.rollout(policy, [TASK], 1, generator())[0].turns
    assert [t.ids for t in turns] == [stop, fence, stop] and [t.truncated for t in turns] == [False, True, False]
    assert policy.tokenizer.decode(turns[2].prompt).endswith("Write the commit message.<|end|><|assistant|>")
    monkeypatch.setattr(fsd, "sample", real_sample)
    monkeypatch.setattr(fsd.Policy, "max_context", len(turns[0].prompt) + policy.max_tokens)
    full = fsd.rollout(policy, [TASK], 1, generator())[0]
    assert len(full.turns) == 1 and not full.env.success
    fsd.attach_hints(policy, full.turns, lambda turns: ["much too long a hint " * 20 for _ in turns])
    assert full.turns[0].hint is None and full.turns[0].hinted_prompt == []


# -------------------------------------------------------------------------- advantages and GRPO
def test_advantages_are_per_group_and_zero_without_variance():
    rewards = torch.tensor([1.0, 0.0, 5.0, 5.0, 0.3, 10.0, 12.0])
    groups = torch.tensor([0, 0, 1, 1, 2, 3, 3])
    assert fsd.group_advantages(rewards, groups).tolist() == [1, -1, 0, 0, 0, -1, 1]


def test_grpo_loss_is_the_clipped_surrogate():
    """At ratio 1 the value is -sum A whatever the policy, so only the gradient is worth testing."""
    advantages = torch.tensor([2.0, -1.0, 1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    ratio = torch.tensor([1.0, 1.0, 1.5, 0.5, 1.5, 0.5], dtype=torch.float64)
    logprobs = ratio.log().requires_grad_()
    loss = fsd.grpo_loss(logprobs, torch.zeros(6, dtype=torch.float64), advantages, clip=0.2)
    assert loss.item() == pytest.approx(-(2 - 1 + 1.2 + 0.5 - 1.5 - 0.8))
    loss.backward()
    assert torch.allclose(logprobs.grad, torch.tensor([-2.0, 1.0, 0.0, -0.5, 1.5, 0.0], dtype=torch.float64))


# ---------------------------------------------------------------------------- self-distillation
def test_distill_loss_is_kl_of_teacher_to_student():
    teacher = torch.tensor([[0.9, 0.05, 0.05]]).log()
    student = torch.tensor([[0.05, 0.05, 0.9]]).log()
    assert fsd.distill_loss(student, teacher).item() == pytest.approx(2.457, abs=1e-3)
    torch.manual_seed(0)
    p, q = (torch.randn(7, 5, dtype=torch.float64).mul(s).log_softmax(-1) for s in (3, 1))
    oracle = kl_divergence(Categorical(logits=q), Categorical(logits=p))
    each = torch.stack([fsd.distill_loss(a, b) for a, b in zip(p[:, None], q[:, None])])
    assert torch.allclose(each, oracle) and (each > 0).all() and fsd.distill_loss(p, p) == 0


def test_distill_gradient_is_p_minus_q_and_reaches_tokens_the_student_never_proposes():
    z = torch.tensor([[0.0, 0.0, -30.0]], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[0.05, 0.05, 0.9]], dtype=torch.float64).log().requires_grad_()
    loss = lambda z: fsd.distill_loss(z.log_softmax(-1), teacher)
    loss(z).backward()
    assert torch.allclose(z.grad, z.detach().softmax(-1) - teacher.detach().exp()) and z.grad[0, 2] < -0.89
    assert torch.autograd.gradcheck(loss, z) and teacher.grad is None


# ------------------------------------------------------------- alignment, masks, one update's gradient
class OpenModel(torch.nn.Module):
    """A model whose hidden states are given, one leaf per row, so that gradients show what was scored."""
    device = torch.device("cpu")

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(4, 20, bias=False)
        self.seen = []

    def base_model(self, input_ids, use_cache):
        hidden = torch.randn(*input_ids.shape, 4, requires_grad=True)
        self.seen.append((input_ids, hidden))
        return type("Output", (), {"last_hidden_state": hidden})

    def get_output_embeddings(self):
        return self.head


def test_exactly_the_positions_that_predict_sampled_tokens_are_scored():
    """A shift by one, a mask over the prompt or a scored padding would still train something."""
    model, prompts, replies = OpenModel(), [[1, 2, 3], [4], [5, 6]], [[7, 8], [9, 10, 11], [12]]
    logits = fsd.score(model, prompts, replies)
    (ids, hidden), = model.seen
    at = [(0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (2, 1)]
    assert [ids[b, t + 1].item() for b, t in at] == [7, 8, 9, 10, 11, 12]
    assert torch.allclose(logits, torch.stack([model.head(hidden[b, t]) for b, t in at]))
    logits.square().sum().backward()
    assert hidden.grad.abs().sum(-1).nonzero().tolist() == [list(x) for x in at]


def test_teacher_and_student_align_for_hints_of_any_length(policy):
    """Each teacher row equals its own unpadded forward; with an empty hint both views are one."""
    later = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    turns = [make_turn(policy, "fix it", hint="x"), make_turn(policy, "Fixed it.", hint="x " * 300),
             make_turn(policy, "ok", hint="y", messages=later)]
    logits = fsd.score(policy.model, [t.hinted_prompt for t in turns], [t.ids for t in turns])
    ids = torch.tensor([i for t in turns for i in t.ids])
    scored = F.log_softmax(logits / policy.temperature, -1).gather(1, ids[:, None])[:, 0]
    assert torch.allclose(scored, torch.cat([logprobs_of(policy, t.hinted_prompt, t.ids) for t in turns]), atol=1e-3)
    empty = [make_turn(policy, "fix it", hint=""), make_turn(policy, "Fixed it.", hint="", messages=later)]
    grad, stats = gradient(policy, policy.model, empty)
    assert stats["distill_loss"] == pytest.approx(0, abs=1e-6) and grad.abs().max() < 1e-4


def test_update_is_the_loss_of_the_docstring(policy):
    """Oracle: the whole loss written naively, one unpadded turn after the other."""
    teacher = copy.deepcopy(policy.model)
    for p in teacher.parameters():
        p.data.mul_(1.1)
    turns = [make_turn(policy, "fix it now", advantage=1.5, hint="x " * 20), make_turn(policy, "ok", advantage=-0.5),
             make_turn(policy, "Fixed it.", hint="y"), make_turn(policy, "not trained")]
    total, loss = sum(len(t.ids) for t in turns), 0.0
    for t in turns:
        rows = lambda model, prompt: (model(torch.tensor([prompt + t.ids])).logits[0, len(prompt) - 1:-1]
                                      / policy.temperature)
        student = Categorical(logits=rows(policy.model, t.prompt))
        loss = loss - t.advantage * student.log_prob(torch.tensor(t.ids)).sum() / total
        if t.hint:
            with torch.no_grad():
                hinted = Categorical(logits=rows(teacher, t.hinted_prompt))
            loss = loss + 0.3 * kl_divergence(hinted, student).sum() / total
    oracle = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(policy.model.parameters()))])
    for batch_tokens, order in ((10_000, turns), (1, turns), (60, turns[::-1])):
        grad, stats = gradient(policy, teacher, order, coef=0.3, batch_tokens=batch_tokens)
        assert torch.allclose(grad, oracle, atol=1e-4 * oracle.abs().max()), batch_tokens
        assert stats["max_logprob_gap"] < 1e-4
    assert all(p.grad is None for p in teacher.parameters())


def test_a_live_teacher_gives_no_gradient(policy):
    turns = [make_turn(policy, "fix it now", hint="x y z")]
    live, _ = gradient(policy, policy.model, turns)
    frozen, _ = gradient(policy, copy.deepcopy(policy.model), turns)
    assert torch.equal(live, frozen) and live.abs().max() > 1e-3


def test_passed_turns_are_not_distilled_and_a_step_without_signal_is_skipped(policy):
    """AdamW moves weights on all-zero gradients: momentum of earlier steps, decay."""
    hinted, passed = make_turn(policy, "ok", hint="x"), make_turn(policy, "fix(f): now", advantage=0.0)
    alone, _ = gradient(policy, policy.model, [hinted])
    both, stats = gradient(policy, policy.model, [hinted, passed])
    n, m = len(hinted.ids), len(passed.ids)
    assert torch.allclose(both * (n + m) / n, alone, atol=1e-5)
    optimizer, before = torch.optim.AdamW(policy.model.parameters(), lr=0.1), copy.deepcopy(policy.model.state_dict())
    stats = fsd.update(policy, policy.model, optimizer, [passed], fsd.Config())
    assert stats["update_tokens"] == 0 and stats["grad_norm"] == 0
    assert all(torch.equal(before[k], v) for k, v in policy.model.state_dict().items())
    fsd.update(policy, policy.model, optimizer, [hinted], fsd.Config())
    assert not all(torch.equal(before[k], v) for k, v in policy.model.state_dict().items())


def test_the_hint_is_never_in_the_students_context(policy):
    """Not in its prompt, not in later turns, not in evaluation: else nothing has to be learnt."""
    cfg = fsd.Config(tasks=2, group=2, eval_episodes=2, temperature=policy.temperature)
    seen, score = [], fsd.score
    teacher = copy.deepcopy(policy.model)
    spy = pytest.MonkeyPatch()
    spy.setattr(fsd, "score", lambda model, prompts, replies: seen.extend((model is teacher, p) for p in prompts)
                or score(model, prompts, replies))
    optimizer = torch.optim.AdamW(policy.model.parameters())
    metrics = fsd.train_step(policy, teacher, optimizer, random.Random(0), generator(), cfg)
    spy.undo()
    hinted = lambda ids: bool(re.search("tags|Write it as", policy.tokenizer.decode(ids)))
    assert seen and all(hinted(prompt) == is_teacher for is_teacher, prompt in seen)
    assert metrics["turns_hinted"] == metrics["tokens_distilled"] == 1  # a random model fails every turn
    _, episodes = fsd.evaluate(policy, cfg)
    assert not any(hinted(t.prompt) for e in episodes for t in e.turns)
    _, episodes = fsd.evaluate(policy, cfg, hinted=True)
    assert all(hinted(t.prompt) for e in episodes for t in e.turns)
    assert not any(hinted(fsd.render(policy, t.messages)) for e in episodes for t in e.turns)


def test_every_turn_carries_its_episodes_advantage_and_groups_stay_apart(policy, monkeypatch):
    """Two groups of the same task must not share a baseline."""
    caught = []
    monkeypatch.setattr(envs, "make_task", lambda seed: TASK)
    rewards = iter([1.0, 4.0, 3.0, 4.0])  # groups 0, 1, 0, 1
    monkeypatch.setattr(fsd.Episode, "reward", lambda self, bonus: self.__dict__.setdefault("r", next(rewards, 0)))
    monkeypatch.setattr(fsd, "update", lambda _, __, ___, turns, cfg: caught.extend(turns) or {})
    metrics = fsd.train_step(policy, None, None, random.Random(0), generator(), fsd.Config(tasks=2, group=2))
    assert [t.advantage for t in caught] == [-1.0] * 3 + [0.0] * 3 + [1.0] * 3 + [0.0] * 3
    assert metrics["flat_groups"] == 0.5


# --------------------------------------------------------------------------------- the real main
KEYS = {"step", "reward", "success", "patch", "style", "grpo_loss", "distill_loss", "turns_hinted", "tokens_distilled",
        "flat_groups", "entropy_failed", "entropy_passed", "reply_tokens", "truncated", "max_logprob_gap", "grad_norm",
        "rollout_s", "update_s", "rollout_tokens", "update_tokens"}


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A base that is trained for a few steps only: all of the real code, none of the skill."""
    folder = tmp_path_factory.mktemp("base")
    fsd.BASE.update(steps=12, batch=8, hidden=32, layers=2)
    return folder


def run(tmp_path, base, *flags):
    small = "--steps 2 --tasks 2 --group 2 --eval_episodes 4 --max_tokens 12".split()
    fsd.main(["--out", str(tmp_path), "--base", str(base), *small, *flags])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    return lines, json.loads((tmp_path / "summary.json").read_text())


@pytest.mark.parametrize("method", ["fsd", "grpo", "distill"])
def test_main_runs_end_to_end(tmp_path, base, method, capsys):
    lines, summary = run(tmp_path, base, "--method", method)
    assert [line["step"] for line in lines] == [1, 2] and KEYS <= lines[0].keys()
    assert all(line["max_logprob_gap"] < 1e-3 for line in lines)
    assert (lines[0]["turns_hinted"] > 0) == (method != "grpo") == (lines[0]["distill_loss"] > 0)
    assert summary["before"]["episodes"] == summary["after"]["episodes"] == 4
    assert summary["base"].keys() >= {"success", "unhinted", "hinted"}
    assert {"success", "patch", "style", "entropy", "reply_tokens"} <= summary["after"].keys()
    AutoTokenizer.from_pretrained(tmp_path / "policy")
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    assert isinstance(trained, LlamaForCausalLM)
    run(tmp_path / "again", base, "--model", str(tmp_path / "policy"), "--method", method)
    output = capsys.readouterr().out.replace(str(tmp_path), "OUT").replace(str(base), "BASE")
    assert max(map(len, output.splitlines())) <= 80 and "before" in output and "after" in output


def test_one_seed_one_result(tmp_path, base):
    results = [run(tmp_path / name, base, "--seed", seed)[0] for name, seed in (("a", "3"), ("b", "3"), ("c", "4"))]
    for line in sum(results, []):
        del line["rollout_s"], line["update_s"]
    assert results[0] == results[1] != results[2]


def test_the_base_is_reused_until_its_settings_change(tmp_path, base, capsys, monkeypatch):
    run(tmp_path, tmp_path / "b")
    assert "training it once" in capsys.readouterr().out
    run(tmp_path, tmp_path / "b")
    assert "reusing" in capsys.readouterr().out
    monkeypatch.setitem(fsd.BASE, "lr", 0.001)
    run(tmp_path, tmp_path / "b")
    assert "made with other settings" in capsys.readouterr().out


def test_ctrl_c_keeps_the_metrics_and_the_policy(tmp_path, base, monkeypatch):
    step = fsd.train_step
    calls = iter([step])

    def interrupted(*args):
        return next(calls, None)(*args) if calls.__length_hint__() else (_ for _ in ()).throw(KeyboardInterrupt)
    monkeypatch.setattr(fsd, "train_step", interrupted)
    with pytest.raises(SystemExit) as end:
        run(tmp_path, base)
    assert end.value.code == 130
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
    assert json.loads((tmp_path / "summary.json").read_text())["after"] is None
    AutoModelForCausalLM.from_pretrained(tmp_path / "policy")


@pytest.mark.parametrize("flags, message", [
    ("--metod fsd", "unrecognized arguments: --metod"), ("--method ppo", "--method ppo: choose one of fsd, grpo, distill"),
    ("--teacher ema", "choose one of frozen, live"), ("--steps 0", "--steps 0: must be at least 1"),
    ("--group 1", "--group 1: must be at least 2"), ("--temperature 0", "--temperature 0.0: must be above 0"),
    ("--temperature nan", "must be above 0"), ("--lr inf", "must be above 0"), ("--steps many", "invalid int value"),
    ("--model no/such-model", "--model no/such-model: no causal language model"),
    ("--model {tmp}", "no causal language model"), ("--model {untemplated}", "needs a chat template"),
    ("--out {file}/x", "cannot write there")])
def test_bad_input_ends_with_a_message_before_any_work(tmp_path, base, tokenizer, flags, message, capsys):
    (tmp_path / "file").write_text("")
    model = LlamaForCausalLM(LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                         num_attention_heads=1))
    model.save_pretrained(tmp_path / "untemplated")
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    plain.save_pretrained(tmp_path / "untemplated")
    flags = flags.format(tmp=tmp_path, file=tmp_path / "file", untemplated=tmp_path / "untemplated").split()
    with pytest.raises(SystemExit) as end:
        fsd.main(["--out", str(tmp_path / "out"), *flags] if "--out" not in flags else flags)
    assert message in f"{end.value.code} {capsys.readouterr().err}"
    assert not (tmp_path / "out" / "base").exists()


def test_the_readme_tells_the_truth_about_the_files():
    """Line counts, and the functions that its tables name."""
    readme = Path(__file__).with_name("README.md").read_text()
    for name in ("fsd.py", "envs.py", "test_fsd.py"):
        lines = len(Path(__file__).with_name(name).read_text().splitlines())
        assert f"| `{name}` | {lines} |" in readme
    for name in re.findall(r"`(\w+)\(\)`", readme):
        assert hasattr(fsd, name) or hasattr(envs, name) or hasattr(envs.Repair, name), name
