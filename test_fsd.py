"""The claims of the method and of this code, offline, on the CPU, in a minute.
A test's name is the claim; its docstring says why the bug would be silent."""
import os

os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")  # before torch is imported

import copy
import dataclasses
import json
import math
import random
import re
import time
from pathlib import Path

import pytest
import torch
from torch.distributions import Categorical, kl_divergence
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import envs
import fsd

torch.set_num_threads(1)  # tiny models; two threads crawl when the cores are busy

STRICT = """{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate, starting with user') }}{% endif %}
{{- '<|' + m.role + '|>' + (m.content | trim) + '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
TASK = envs.Task("f", "x", steps=(("multiply by", 2), ("add", 5)),
                 bug=(("multiply by", 3), ("subtract", 5)), inputs=(1, 2, 3))
RIGHT = "def f(x): return (x * 2) + 5"


@pytest.fixture(scope="session")
def tokenizer():
    demonstrations = sum(envs.base_demonstrations()[:10], [])
    return envs.base_tokenizer([m["content"] for messages in demonstrations for m in messages])


@pytest.fixture(params=["llama", "gpt2"])
def policy(request, tokenizer):
    """Tiny random models: rotary positions hide position bugs, and only GPT-2 has dropout."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
                 max_position_embeddings=700, vocab_size=len(tokenizer) + 5, bos_token_id=None,
                 eos_token_id=tokenizer.eos_token_id)
    model = (LlamaForCausalLM(LlamaConfig(**sizes)) if request.param == "llama" else
             GPT2LMHeadModel(GPT2Config(**sizes)))
    for p in model.parameters():
        p.data.mul_(4)  # peaked distributions: an error of position or mask becomes large
    return fsd.Policy(model, tokenizer, stop_ids={tokenizer.eos_token_id}, max_context=700,
                      temperature=0.7, max_tokens=12, sample_rows=5000)


def generator():
    return torch.Generator().manual_seed(0)


def distribution(policy, model, prompt, ids):
    """Oracle: one unpadded row through the whole model; N distributions."""
    logits = model.eval()(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1:-1]
    return Categorical(logits=logits / policy.temperature)


def logprobs_of(policy, prompt, ids):
    return distribution(policy, policy.model, prompt, ids).log_prob(torch.tensor(ids)).detach()


def make_turn(policy, text, advantage=0.0, hint=None, said="a b c"):
    messages = [{"role": "user", "content": said}]
    prompt, ids = fsd.render(policy, messages), policy.tokenizer.encode(text) + [*policy.stop_ids]
    logprobs = logprobs_of(policy, prompt, ids).tolist()
    turn = fsd.Turn(TASK, "commit", messages, prompt, ids, logprobs, [1.0] * len(ids), False, text,
                    envs.shown(TASK, "commit", text), advantage=advantage)
    if hint is not None:
        turn.hint, turn.hinted_prompt = hint or "(empty)", fsd.render(policy, messages, hint)
    return turn


def gradient(policy, teacher, turns, **settings):
    """(the gradient that `update` computes, as one vector; its statistics)."""
    cfg = fsd.Config(temperature=policy.temperature, **settings)
    weights = [p.detach().float() for p in policy.model.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_, **__: torch.tensor(0.0))
        stats = fsd.update(policy, teacher, optimizer, turns, cfg)
    return torch.cat([w.grad.flatten() for w in weights]), stats


# ---------------------------------------------------------------------------------- environment
def test_tasks_are_functions_of_their_seed_and_held_out_steps_are_never_trained_on():
    draw = lambda first: [envs.make_task(seed) for seed in range(first, first + 400)]
    train, held_out = draw(0), draw(envs.HELD_OUT)
    assert train == draw(0) and held_out == draw(envs.HELD_OUT)
    assert not {t.steps for t in train} & {t.steps for t in held_out}
    reworded = envs.make_task(envs.HELD_OUT, "other")
    assert dataclasses.replace(reworded, wording="plain") == held_out[0]
    asked = [envs.Repair(task) for task in (held_out[0], reworded)]
    assert asked[0].first_message() != asked[1].first_message()
    assert len({env.step(f"```\n{env.task.source(env.task.steps)}```") for env in asked}) == 2


def test_the_interpreter_agrees_with_python():
    """Oracle: Python itself, on sources of our own. A wrong interpreter would reward wrong code."""
    bodies = ["return (x * 3) - 5", "y = x + 1\n    y *= 2\n    return y", "pass",
              "'doc'\n    return -x % 3 + x // 2 - (+7 / 2)"]
    for body in bodies:
        source, names = f"def f(x: int) -> int:\n    {body}\n", {}
        exec(source, names)
        function, _ = envs.read_edit(TASK, f"```python\n{source}```")
        for x in range(-5, 6):
            assert envs.run_function(function, x) == names["f"](x), (body, x)


HOSTILE = [
    "9**9**9", "x" + "*x" * 900, "10 ** -10 ** 10", "(-8) ** 0.5", "1e999 // 1", "1 << 10**9",
    "0x" + "f" * 1500, "int(1e308 * 10)", "int('9' * 9)", "int(x, 2)", "min()", "max(x)", "1 % 0",
    "(" * 900 + "x" + ")" * 900, "-" * 1900 + "x", "[" * 500, "x" + " + x" * 2_000_000, "f(x)",
    "__import__('os').system('exit')", "().__class__", "open('/etc/passwd')", "'a' * 10**9",
    "x if x else x", "x < 2", "x and x", "not x", "[0] * 10**9", "lambda: x", "f'{x}'",
    "(x := 10**9)", "undefined", "x\x00", "x \ud800",
    "x\n    while True: pass", "x\n    global f", "x\n    abs = min = print", "<patch>" * 300_000]


@pytest.mark.parametrize("frame", [
    "```\ndef f(x): return {}\n```", "<patch>def f(x):\n  while 1: {}</patch>", "{}"])
def test_nothing_a_model_writes_raises_hangs_or_changes_the_trainer(frame):
    for code in HOSTILE:
        env, text, start = envs.Repair(TASK), frame.replace("{}", code), time.perf_counter()
        assert 0 < len(env.step(text)) < 200 and not env.success
        assert envs.hints(TASK, "commit", text) and time.perf_counter() - start < 2
        assert envs.Repair(TASK).step(f"```\n{RIGHT}\n```").startswith("3 of 3") and abs(-1) == 1


@pytest.mark.parametrize("reply, observation, in_format", [
    (f"<patch>\n{RIGHT}\n</patch>", "3 of 3", True),
    (f"So:\n<patch>\n```python\n    {RIGHT}\n```\n</patch> Done.", "3 of 3", True),
    (f"```python\n{RIGHT}\n```", "3 of 3", False),
    (f"```{RIGHT}```", "3 of 3", False),
    (f"```\nold()\n```\nthen\n```\n{RIGHT}\n```", "3 of 3", False),  # the last block counts
    ("<patch>\ndef f(x): return 0\n</patch>", "0 of 3", True),  # a wrong edit in the right format
    (f"<patch>\n{RIGHT}", "Error: the reply needs one <patch>", False),
    (f"<patch>{RIGHT}</patch><patch>{RIGHT}</patch>", "Error: the reply needs one <patch>", False),
    ("<patch>def f(x) return</patch>", "Error: SyntaxError", False),
    ("<patch>def f(x, y): return x</patch>", "Error: f must take one argument", False),
    ("", "Error: the code does not define f", False), (RIGHT, "3 of 3", False)])
def test_odd_tool_calls_have_a_documented_meaning(reply, observation, in_format):
    assert envs.Repair(TASK).step(reply).startswith(observation)
    assert envs.shown(TASK, "edit", reply) == {"patch": in_format}


def test_both_formats_work_and_the_commit_message_ends_the_episode():
    """Behaviours are neglected, not punished: success may not depend on them."""
    env, edit, message = envs.Repair(TASK), f"```\n{RIGHT}\n```", "Fixed it."
    assert env.step("no code") == "Error: SyntaxError: invalid syntax. Try again."
    assert env.step(edit) == "3 of 3 tests pass. Write a one-line commit message."
    assert env.step(message) is None and env.success
    env = envs.Repair(TASK)
    assert [env.step("no code")[-9:] for _ in range(envs.MAX_EDITS)] == ["ry again.", " message."]
    assert env.step(message) is None and not env.success


def test_a_hint_speaks_of_its_own_turn_and_a_good_turn_gets_none():
    edit, commit = envs.hints(TASK, "edit", "junk"), envs.hints(TASK, "commit", "junk")
    assert "<patch>" in edit and "fix(" not in edit
    assert "fix(f): " in commit and "patch" not in commit
    assert not re.search(r"\d", edit + commit)  # no hidden expected value
    assert envs.hints(TASK, "edit", f"<patch>{RIGHT}</patch>") is None
    assert envs.hints(TASK, "commit", "fix(f): double x") is None
    for bad in ("fix(g): double x", "fix(f):", "Done. fix(f): x", "fix(f): " + "x" * 110):
        assert envs.hints(TASK, "commit", bad)


@pytest.mark.parametrize("template", [envs.TEMPLATE, STRICT])
def test_contexts_are_the_templates_own_and_hints_add_no_message(policy, template, monkeypatch):
    monkeypatch.setattr(policy.tokenizer, "chat_template", template)
    for turn in (t for e in fsd.rollout(policy, [TASK], 3, generator()) for t in e.turns):
        text = policy.tokenizer.apply_chat_template(turn.messages, tokenize=False,
                                                    add_generation_prompt=True)
        assert turn.prompt == policy.tokenizer.encode(text)
        fsd.attach_hints(policy, [turn], fsd.rule_judge([turn]))
        ask = "<|end|><|assistant|>"
        hinted = text.removesuffix(ask) + f"\n{turn.hint}" + ask
        assert policy.tokenizer.decode(turn.hinted_prompt) == hinted


def test_sampler_and_scorer_agree_at_any_padding_and_temperature(policy):
    """Every ratio is 1 before the first update. The oracle knows neither batch nor padding, nor
    dropout, and a model left in training mode must not change that."""
    prompts = [policy.tokenizer.encode("a b c d e f g h"[:n]) for n in (1, 15, 4, 9)]
    policy.sample_rows = 3  # more prompts than rows: two blocks
    for policy.temperature in (0.5, 1.0, 1.7):
        policy.model.train()
        replies, logprobs, entropies = zip(*fsd.sample(policy, prompts, generator()))
        policy.model.train()
        scored = torch.cat(fsd.score(policy.model, prompts, replies))
        oracle = [distribution(policy, policy.model, p, r) for p, r in zip(prompts, replies)]
        expected = torch.cat([d.log_prob(torch.tensor(r)) for d, r in zip(oracle, replies)])
        assert torch.allclose(torch.tensor(sum(logprobs, [])), expected, atol=1e-4)
        scored = fsd.log_probs(policy.model, scored, policy.temperature)
        scored = Categorical(logits=scored).log_prob(torch.tensor(sum(replies, [])))
        assert torch.allclose(scored, expected, atol=1e-4)
        expected = torch.cat([d.entropy() for d in oracle])
        assert torch.allclose(torch.tensor(sum(entropies, [])), expected, atol=1e-3)


def test_sample_draws_from_the_softmax_when_the_pad_id_is_the_stop_id(policy):
    """Frequencies of 4000 draws behind a padded prompt. A mask made from ids would hide tokens."""
    policy.tokenizer = copy.deepcopy(policy.tokenizer)
    policy.tokenizer.pad_token, policy.max_tokens = policy.tokenizer.eos_token, 1
    stop = policy.tokenizer.eos_token
    prompt, longer = (policy.tokenizer.encode(stop + text) for text in ("a b", "a b c d e f"))
    replies = fsd.sample(policy, [longer] + [prompt] * 4000, generator())
    drawn = [ids[0] for ids, _, _ in replies[1:]]
    p = distribution(policy, policy.model, prompt, drawn[:1]).probs[0]
    counts = torch.bincount(torch.tensor(drawn), minlength=len(p))
    assert (counts / 4000 - p).abs().sum() / 2 < 0.5 * math.sqrt(len(p) / 4000)


def test_rows_that_stop_leave_the_batch_and_the_others_go_on_unharmed(policy):
    """A row that continues on its neighbour's cache still looks like text."""
    stop = list(range(0, policy.model.config.vocab_size, 3))  # a third of all draws
    policy.stop_ids = set(stop)
    prompts = [policy.tokenizer.encode(c) for c in "abcdefghijklmnop"]
    replies = fsd.sample(policy, prompts, generator())
    assert len({len(ids) for ids, _, _ in replies}) > 3
    for prompt, (ids, logprobs, _) in zip(prompts, replies):
        assert not set(stop) & set(ids[:-1])
        assert torch.allclose(torch.tensor(logprobs), logprobs_of(policy, prompt, ids), atol=1e-4)


def test_degenerate_turns_work_and_ids_stay_as_sampled(policy):
    """Only a stop token; cut inside a code block that is spelled letter by letter, which a round
    trip through text would merge; a full context; a hint that does not fit."""
    stop, spelled = [*policy.stop_ids], [policy.tokenizer.encode(c)[0] for c in "```\ndef f("]
    with pytest.MonkeyPatch.context() as patch:
        script = iter([stop, spelled, stop])
        patch.setattr(fsd, "sample", lambda *_: [(ids, [0.0], [0.0]) for ids in [next(script)]])
        turns = fsd.rollout(policy, [TASK], 1, generator())[0].turns
    assert [t.ids for t in turns] == [stop, spelled, stop]
    assert len(policy.tokenizer.encode(turns[1].text)) < len(spelled)
    assert [t.truncated for t in turns] == [False, True, False]
    assert policy.tokenizer.decode(turns[2].prompt).endswith("commit message.<|end|><|assistant|>")
    policy.max_context = len(turns[0].prompt) + policy.max_tokens
    full, = fsd.rollout(policy, [TASK], 1, generator())
    assert len(full.turns) == 1 and not full.env.success
    fsd.attach_hints(policy, full.turns, ["a hint that is too long " * 20])
    assert full.turns[0].hint is None and full.turns[0].hinted_prompt == []


def test_advantages_are_per_group_and_zero_without_variance():
    rewards = torch.tensor([[1.0, 0.0], [0.1, 0.1], [10.0, 12.0]])
    assert fsd.group_advantages(rewards).tolist() == [[1, -1], [0, 0], [-1, 1]]
    assert fsd.group_advantages(torch.tensor([[0.3]])).tolist() == [[0]]


def test_grpo_loss_is_the_clipped_surrogate():
    """At ratio 1 the value is -sum A whatever the policy, so only the gradient can tell."""
    advantages = torch.tensor([2.0, -1.0, 1.0, 1.0, -1.0, -1.0])
    logprobs = torch.tensor([1.0, 1.0, 1.5, 0.5, 1.5, 0.5]).log().requires_grad_()
    loss = fsd.grpo_loss(logprobs, torch.zeros(6), advantages)
    assert loss.item() == pytest.approx(-(2 - 1 + 1.2 + 0.5 - 1.5 - 0.8))
    loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([-2.0, 1.0, 0.0, -0.5, 1.5, 0.0])


def test_distill_loss_is_the_kl_of_teacher_to_student():
    teacher, student = torch.tensor([[0.9, 0.05, 0.05]]), torch.tensor([[0.05, 0.05, 0.9]])
    assert fsd.distill_loss(student.log(), teacher.log()).item() == pytest.approx(2.457, abs=1e-3)
    p, q = torch.randn(2, 7, 5, generator=generator()).log_softmax(-1)
    for loss, (a, b) in ((fsd.distill_loss, (q, p)), (fsd.reverse_distill_loss, (p, q))):
        oracle = kl_divergence(Categorical(logits=a), Categorical(logits=b))
        each = torch.stack([loss(x[None], y[None]) for x, y in zip(p, q)])
        assert torch.allclose(each, oracle) and (each > 0).all() and loss(p, p) == 0
    # the gradient is p - q, also where the student never goes
    z = torch.tensor([[0.0, 0.0, -30.0]], dtype=torch.float64, requires_grad=True)
    q = student.double().requires_grad_()
    loss = lambda z: fsd.distill_loss(z.log_softmax(-1), q.log())
    loss(z).backward()
    assert torch.allclose(z.grad, z.detach().softmax(-1) - q) and z.grad[0, 2] < -0.89
    assert torch.autograd.gradcheck(loss, z) and q.grad is None


@pytest.mark.parametrize("kl", ["forward", "reverse"])
def test_update_has_the_gradient_of_the_whole_loss_for_any_split_and_order(policy, kl):
    """Oracle: the loss written out, one unpadded turn after the other, by torch.distributions, with
    hints of 1 and 300 tokens. A teacher's row that is shifted by its hint would still train."""
    teacher = copy.deepcopy(policy.model)
    for p in teacher.parameters():
        p.data.mul_(1.1)
    turns = [make_turn(policy, "fix it now", advantage=1.5, hint="x" * 300),
             make_turn(policy, "ok", advantage=-0.5, said="d"), make_turn(policy, "no", hint="y"),
             make_turn(policy, "counted in N only")]
    loss = 0.0
    for t in turns:
        student = distribution(policy, policy.model, t.prompt, t.ids)
        loss = loss - t.advantage * student.log_prob(torch.tensor(t.ids)).sum()
        if t.hint:
            with torch.no_grad():
                hinted = distribution(policy, teacher, t.hinted_prompt, t.ids)
            pair = (hinted, student) if kl == "forward" else (student, hinted)
            loss = loss + 0.3 * kl_divergence(*pair).sum()
    loss = loss / sum(len(t.ids) for t in turns)
    oracle = torch.autograd.grad(loss, list(policy.model.parameters()))
    oracle = torch.cat([g.flatten() for g in oracle])
    model, calls = policy.model.base_model, []
    layers = model.layers if hasattr(model, "layers") else model.h
    layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    for batch_tokens, order in ((10_000, turns), (1, turns), (60, turns[::-1]), (10_000, turns)):
        calls.clear()
        grad, stats = gradient(policy, teacher, order, coef=0.3, kl=kl,
                               batch_tokens=batch_tokens)
        assert torch.allclose(grad, oracle, atol=1e-4 * oracle.abs().max()), batch_tokens
        assert stats["max_logprob_gap"] < 1e-4
        policy.model.activation_checkpointing_enable()  # from the second on: layers run twice
    assert len(calls) == 2 and all(p.grad is None for p in teacher.parameters())


def test_passed_turns_are_not_distilled_and_a_step_without_signal_is_skipped(policy):
    """AdamW moves weights on all-zero gradients, by the momentum of earlier steps."""
    failed, passed = make_turn(policy, "ok", hint="x"), make_turn(policy, "fix(f): now")
    alone, _ = gradient(policy, policy.model, [failed])
    both, _ = gradient(policy, policy.model, [failed, passed])
    share = len(failed.ids) / (len(failed.ids) + len(passed.ids))
    assert torch.allclose(both, alone * share, atol=1e-5)
    optimizer = torch.optim.AdamW([p.detach() for p in policy.model.parameters()], lr=0.1)
    weights = []
    for turns in ([failed], [passed], [failed]):
        stats = fsd.update(policy, policy.model, optimizer, turns, fsd.Config())
        weights.append(torch.cat([p.detach().flatten() for p in policy.model.parameters()]))
        assert (stats["update_tokens"] > 0) == (stats["grad_norm"] > 0) == (turns == [failed])
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])


def test_bf16_keeps_updates_that_are_smaller_than_its_precision(policy, monkeypatch, tmp_path):
    """A step of 1e-5 on a weight of 0.1 is lost in bf16, every time: nothing would be learnt."""
    for p in policy.model.parameters():
        p.data = p.data.bfloat16()
    teacher, turn = copy.deepcopy(policy.model), make_turn(policy, "fix it", hint="x")
    monkeypatch.setattr(fsd, "train_step", lambda policy, teacher, judge, optimizer, *rest: {
        **dict.fromkeys(fsd.COLUMNS, 0.0),
        **fsd.update(policy, teacher, optimizer, [turn], rest[-1])})
    with (tmp_path / "metrics").open("w") as file:
        fsd.train(policy, teacher, None, fsd.Config(lr=1e-5, steps=40, warmup=0), file)
    weights = zip(policy.model.parameters(), teacher.parameters())
    moved = torch.cat([(p != start)[start.abs() > 0.06] for p, start in weights])
    assert moved.float().mean() > 0.1


@pytest.mark.parametrize("answer, verdict", [
    ("GOOD", None), ("good.", None), ("```\nGOOD\n```", None), ("Verdict: GOOD", None),
    ("HINT: Use the tags.", "Use the tags."), ("```HINT: Use it.```", "Use it."),
    ("```text\nAnswer: hint: Use it.\n```", "Use it."),
    ("", ""), ("HINT:", ""), ("GOOD HINT: x", ""), ("I think GOOD", ""), ("HINT: a\nb", ""),
    ("HINT: " + "x" * 300, ""), ("FAIL", ""), ("{\"verdict\": \"GOOD\"}", ""), ("\x00\ud800", "")])
def test_the_judges_answer_is_read_strictly(answer, verdict):
    """A lenient reader would call junk a pass, or teach it as a hint."""
    assert envs.read_verdict(answer) == verdict


def test_no_answer_of_a_judge_can_stop_training_or_teach(policy, monkeypatch):
    """A random model answers junk; one whose context is too short for the question, nothing."""
    turns = [make_turn(policy, "ok"), make_turn(policy, "fix(f): now")]
    for policy.max_context in (700, 80):
        stats = fsd.attach_hints(policy, turns, fsd.llm_judge(policy, turns))
        assert (stats["judge_unusable"], stats["judge_recall"], turns[0].hint) == (1, 0, None)
    asked = []
    monkeypatch.setattr(fsd, "sample", lambda judge, prompts, _: asked.extend(prompts) or [
        (judge.tokenizer.encode(text), [], []) for text in
        ("HINT: Use fix.<|end|>", "HINT: Use tags.<|end|>")])
    policy.max_context = 700
    stats = fsd.attach_hints(policy, turns, fsd.llm_judge(policy, turns))
    assert turns[0].hint == "Use fix." and "begin with fix(f)" in policy.tokenizer.decode(asked[0])
    assert (stats["judge_precision"], stats["judge_recall"], stats["judge_unusable"]) == (0.5, 1, 0)


def test_noise_misses_and_raises_false_alarms_and_random_hints_keep_the_dose(policy):
    turns = [make_turn(policy, "ok"), make_turn(policy, "fix(f): now")] * 500
    wrong = fsd.altered(fsd.rule_judge, fsd.Config(judge_noise=0.3))(turns)
    assert 120 < wrong[::2].count(None) < 180 and 120 < sum(map(bool, wrong[1::2])) < 180
    everywhere = fsd.altered(fsd.rule_judge, fsd.Config(feedback="all"))(turns)
    assert everywhere == [envs.hints(TASK, "commit")] * 1000
    at_random = fsd.altered(fsd.rule_judge, fsd.Config(feedback="random"))(turns)
    assert sum(map(bool, at_random)) == 500 and 200 < sum(map(bool, at_random[::2])) < 300


def test_only_the_teacher_ever_sees_a_hint(policy, monkeypatch):
    """A hint in the policy's prompt, in a later turn or in evaluation: nothing is left to learn."""
    cfg = fsd.Config(tasks=2, group=2, eval_episodes=2, temperature=policy.temperature)
    seen, score, teacher = [], fsd.score, copy.deepcopy(policy.model)

    def spy(model, prompts, replies):
        seen.extend((model is teacher, prompt) for prompt in prompts)
        return score(model, prompts, replies)
    monkeypatch.setattr(fsd, "score", spy)
    optimizer = torch.optim.AdamW([p.detach() for p in policy.model.parameters()])
    metrics = fsd.train_step(policy, teacher, fsd.rule_judge, optimizer, random.Random(0),
                             generator(), cfg)
    has_hint = lambda ids: bool(re.search("Wrap your answer in|Use the format",
                                          policy.tokenizer.decode(ids)))
    assert seen and all(has_hint(prompt) == by_teacher for by_teacher, prompt in seen)
    assert metrics["turns_hinted"] == metrics["tokens_distilled"] == 1  # random: every turn fails
    seen.clear()
    fsd.train_step(policy, teacher, fsd.rule_judge, optimizer, random.Random(0), generator(),
                   dataclasses.replace(cfg, show_hints=True))
    assert seen and all(has_hint(prompt) for _, prompt in seen)
    for hinted in (False, True):  # but where the settings show it to the policy
        shown = fsd.rollout(policy, [TASK], 1, generator(), hinted)[0].turns
        turns = shown + [t for e in fsd.evaluate(policy, cfg, hinted)[1] for t in e.turns]
        assert all(has_hint(t.prompt) == hinted for t in turns)
        assert not any(has_hint(fsd.render(policy, t.messages)) for t in turns)


def test_turns_carry_their_episodes_advantage_and_equal_tasks_stay_apart(policy, monkeypatch):
    """Two groups that drew the same task must not share a baseline."""
    caught, rewards = [], {}
    values = iter([1.0, 3.0, 4.0, 4.0])  # two groups of two
    monkeypatch.setattr(envs, "make_task", lambda seed, wording: TASK)
    monkeypatch.setattr(fsd.Episode, "reward",
                        lambda self, _: rewards.setdefault(id(self), next(values, None)))
    monkeypatch.setattr(fsd, "update", lambda *args: caught.extend(args[3]) or {})
    metrics = fsd.train_step(policy, None, fsd.rule_judge, None, random.Random(0),
                             generator(), fsd.Config(tasks=2, group=2))
    assert [t.advantage for t in caught] == [-1.0] * 3 + [1.0] * 3 + [0.0] * 6
    assert metrics["flat_groups"] == 0.5


def test_the_figures_of_the_tables_are_what_they_say(policy):
    """Swapped labels would be believed."""
    failed, passed = make_turn(policy, "ok"), make_turn(policy, "fix(f): now")
    failed.entropies, passed.entropies = [3.0], [1.0, 2.0]
    figures = fsd.figures([fsd.Episode(envs.Repair(TASK), [], [failed, passed])], fsd.Config())
    assert [figures[f"entropy{suffix}"] for suffix in ("", "_failed", "_passed")] == [2, 3, 1.5]
    assert figures["style"] == 0.5 and figures["patch"] is None and figures["success"] == 0
    outcomes = fsd.outcomes(figures, None, success_curve=[1, 1, 0, 0, 0, 0, 0.5, 1, 1])
    assert outcomes["worst"] == 0.1 and outcomes["style"] == 0.5 and outcomes["style'"] is None
    runs = [{"curves": {"patch": [0, 0, 1, 1, 1, 0.5]}}, {"curves": {"patch": [0] * 6}}]
    assert fsd.blocks(runs, "patch", 3) == [0, 0.5, 0.375]
    cfg = fsd.Config(eval_episodes=2)
    for reworded in (False, True):
        asked = [e.messages[0]["content"] for e in fsd.evaluate(policy, cfg, False, reworded)[1]]
        assert all(text.startswith("Repair ") == reworded for text in asked)


def test_the_transcript_marks_the_tokens_where_the_hint_speaks(policy):
    """Oracle: KL per token of two unpadded rows."""
    episode, = fsd.rollout(policy, [TASK], 1, generator())
    text = fsd.transcript("before", episode, policy, policy.model)
    nats = []
    for t in episode.turns:
        views = [distribution(policy, policy.model, prompt, t.ids) for prompt in
                 (t.hinted_prompt, t.prompt)]
        nats += kl_divergence(*views).tolist()[:len(t.ids) - (not t.truncated)]
    assert text.count("[[") == sum(k > 1 for k in nats) not in (0, len(nats))
    assert text.count("(hint)") == len(episode.turns) == 3


# --------------------------------------------------------------------------------- the real main
@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A base that is trained for a few steps only: all of the real code, none of the skill."""
    envs.BASE.update(steps=12, batch=8, hidden_size=32, num_hidden_layers=2)
    return tmp_path_factory.mktemp("base")


def run(out, base, *flags):
    small = "--steps 2 --tasks 2 --group 2 --eval_episodes 4 --max_tokens 12".split()
    fsd.main(["--out", str(out), "--base", str(base), *small, *flags])
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return lines, json.loads((out / "summary.json").read_text())


@pytest.mark.parametrize("method", ["fsd", "grpo", "distill"])
def test_main_runs_end_to_end(tmp_path, base, method, capsys):
    lines, summary = run(tmp_path, base, "--method", method)
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["max_logprob_gap"] < 1e-3 for line in lines)
    assert (lines[0]["turns_hinted"] > 0) == (lines[0]["distill_loss"] > 0) == (method != "grpo")
    assert summary["before"]["episodes"] == summary["after"]["episodes"] == 4
    assert summary["hinted"].keys() >= {"success", "patch", "style", "entropy", "reply_tokens"}
    flags = ["--method", method, "--judge", "llm", "--eval_every", "1", "--checkpointing"]
    lines, _ = run(tmp_path / "again", base, "--model", str(tmp_path / "policy"), *flags)
    assert "held_out" in lines[0] and lines[0]["judge_unusable"] == (method != "grpo")
    output = capsys.readouterr().out.replace(str(tmp_path), "OUT").replace(str(base), "BASE")
    assert max(map(len, output.splitlines())) <= 80 and re.search("before.*after", output, re.S)


def test_compare_resumes_and_its_arms_differ_where_they_say(tmp_path, base, capsys):
    """Real processes. A run that was not finished is made again, a finished one is read."""
    run(tmp_path / "x", base)
    flags = (f"--compare --quick --seeds 2 --model {tmp_path}/x/policy --out {tmp_path}/c "
             "--steps 2 --tasks 2 --group 2 --eval_episodes 2 --max_tokens 12").split()
    tables, results, made = [], [], []
    for interrupted in (False, True):
        if interrupted:
            (tmp_path / "c/fsd-1/summary.json").unlink()
        capsys.readouterr()
        fsd.main(flags)
        tables.append(capsys.readouterr().out.replace(str(tmp_path), "OUT"))
        results.append(json.loads((tmp_path / "c/compare.json").read_text()))
        made.append({path.parent.name: path.stat().st_mtime_ns
                     for path in tmp_path.glob("c/*/summary.json")})
    assert tables[0] == tables[1] and results[0] == results[1] and len(made[0]) == 8
    assert [name for name in made[0] if made[0][name] != made[1][name]] == ["fsd-1"]
    assert max(map(len, tables[0].splitlines())) <= 80 and tables[0].count("±") > 20
    default = results[0]["fsd"][0]["config"]
    for arm, runs in results[0].items():
        for seed, result in enumerate(runs):
            own = dict(seed=seed, out=f"{tmp_path}/c/{arm}-{seed}")
            assert result["config"] == {**default, **fsd.ARMS[arm], **own}


def test_a_finished_run_is_read_until_its_settings_or_its_base_change(tmp_path):
    """A table of runs on two bases would look like any other."""
    cfg = fsd.Config(out=str(tmp_path), steps=3)
    (tmp_path / "metrics.jsonl").write_text('{"success": 1, "patch": null, "style": 0}\n')
    (tmp_path / "summary.json").write_text(json.dumps(
        dict(config=dataclasses.asdict(cfg), reworded_after=None, stopped="FloatingPointError")))
    curves = fsd.run_arm(cfg)["curves"]  # after a step
    assert curves == {"success": [1, 0, 0], "patch": [0, 0, 0], "style": [0, 0, 0]}
    assert not fsd.finished(dataclasses.replace(cfg, lr=1.0))
    (tmp_path / "summary.json").rename(tmp_path / "saved")
    for damaged in ("", "{}", '{"config": '):
        (tmp_path / "summary.json").write_text(damaged)
        assert not fsd.finished(cfg)
    (tmp_path / "saved").rename(tmp_path / "summary.json")
    assert fsd.finished(cfg)
    (tmp_path / "base").mkdir()
    (tmp_path / "base/made_with.json").write_text("")
    assert not fsd.finished(cfg)
    assert fsd.interval([0.5, 0.7]) == "0.60±1.27" and fsd.interval([0.5, None]) == "-"


def test_one_seed_one_result(tmp_path, base):
    flags = (["3"], ["3"], ["4"], ["3", "--teacher", "live"])
    results = [run(tmp_path / str(i), base, "--seed", *f)[0] for i, f in enumerate(flags)]
    for line in sum(results, []):
        del line["rollout_s"], line["update_s"]
    assert results[0] == results[1] != results[2]
    # a live teacher is another one from the second step on
    assert results[0][0] == results[3][0] and results[0][1] != results[3][1]


def test_the_base_is_reused_until_its_settings_change(tmp_path, base, capsys, monkeypatch):
    for lr, said in ((1, "training for"), (1, "reusing"), (2, "training for")):
        monkeypatch.setitem(envs.BASE, "lr", lr * 0.001)
        run(tmp_path, tmp_path / "b")
        assert said in capsys.readouterr().out


def test_ctrl_c_keeps_the_metrics_and_the_policy(tmp_path, base, monkeypatch):
    def ctrl_c(*_):
        raise KeyboardInterrupt
    steps = iter([fsd.train_step, ctrl_c])
    monkeypatch.setattr(fsd, "train_step", lambda *args: next(steps)(*args))
    with pytest.raises(SystemExit) as end:
        run(tmp_path, base)
    assert end.value.code == 130
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
    assert json.loads((tmp_path / "summary.json").read_text())["after"] is None
    assert LlamaForCausalLM.from_pretrained(tmp_path / "policy").num_parameters() > 0


def test_a_run_that_diverges_in_its_last_update_says_so_and_counts_as_made(tmp_path, base, capsys):
    with pytest.raises(SystemExit) as end:
        run(tmp_path, base, "--steps", "1", "--lr", "1e12", "--warmup", "0")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (end.value.code, summary["stopped"], summary["after"]) == (1, "FloatingPointError", None)
    assert fsd.finished(fsd.Config(**summary["config"]))
    assert "try a lower --lr" in capsys.readouterr().out


def test_a_pretrained_model_has_its_own_defaults_and_flags_win():
    cfg = fsd.parse_args(["--model", "x", "--steps", "7"])
    assert cfg == fsd.Config(model="x", **{**fsd.PRETRAINED, "steps": 7})


@pytest.mark.parametrize("flags, message", [
    ("--metod fsd", "unrecognized arguments: --metod"),
    ("--method ppo", "choose one of fsd grpo distill"), ("--judge_noise 2", "at most 1"),
    ("--steps 0", "--steps 0: must be finite, at least 1"), ("--steps many", "invalid int value"),
    ("--group 1", "at least 2"), ("--temperature 0", "--temperature 0.0: must be finite, at least"),
    ("--lr nan", "must be finite, at least"), ("--judge llm", "cannot judge"),
    ("--seeds 3", "go with --compare"), ("--compare --kl reverse", "--compare sets it"),
    ("--compare --seed 1", "--compare sets it"),
    ("--model no/such-model", "cannot use no/such-model as a chat model"),
    ("--model {tmp}", "as a chat model"), ("--model {tmp}/plain", "no chat template"),
    ("--base {tmp}/other", "--base {tmp}/other: holds another model"),
    ("--base {tmp}/out/policy", "writes there, choose another"),
    ("--out {tmp}/file/x", "cannot write to {tmp}/file/x")])
def test_bad_input_ends_with_a_message_before_any_work(tmp_path, tokenizer, flags, message, capsys):
    (tmp_path / "file").write_text("")
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    plain.save_pretrained(tmp_path / "plain")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text("{}")
    with pytest.raises(SystemExit) as end:
        fsd.main(["--out", str(tmp_path / "out"), *flags.format(tmp=tmp_path).split()])
    assert message.format(tmp=tmp_path) in f"{end.value.code} {capsys.readouterr().err}"
    assert not (tmp_path / "out" / "base").exists()


def test_the_functions_that_the_readme_names_exist():
    readme = Path(__file__).with_name("README.md").read_text()
    names = set(re.findall(r"`(\w+)\(\)`", readme))
    assert len(names) > 5 and names <= {*dir(fsd), *dir(envs)}
