"""Feedback self-distillation (FSD) in one file.

A language-model agent learns behaviours that it never shows by itself: for each turn that failed to
show one, the same model with a hint in its context is the teacher.

The algorithm, and the function that does each step:
  1. rollout            the policy plays G episodes per task, several turns each, without hints
  2. rule_judge         a judge reads each turn and writes a short hint if the turn failed
  3. attach_hints       the teacher's view: the same conversation, its last message plus the hint
  4. group_advantages   the RL part: an episode's reward against the others of its task,
     grpo_loss          and the policy-gradient loss on all sampled tokens
  5. distill_loss       on failed turns only: the teacher scores the very tokens that the policy
                        sampled without the hint, and the policy is pulled to its distributions
  6. update             L = (L_grpo + coef * L_distill) / N, one AdamW step
  7. evaluate           held-out tasks without hints: have the behaviours moved into the weights?

Symbols: B rows, T tokens in a row, n tokens of a reply, N of all replies, V vocabulary, H hidden
size, G episodes per task. A turn is (prompt ids, sampled ids); only these are scored, as sampled.

The paper ("Coding agents can learn neglected behaviors without sacrificing baseline performance",
Frans et al.) is public as a digest without formulas. Our choices: the failed turn itself is scored
again (no second rollout); the loss is KL(teacher || student) over the full vocabulary, divided by
all sampled tokens, so that it fades as failures do; the teacher is a copy of the initial model.

    python fsd.py                             embedded base model, some minutes on a CPU
    python fsd.py --model NAME_OR_FOLDER      a pretrained chat model
    python fsd.py --help                      all settings
"""
import argparse
import copy
import inspect
import json
import multiprocessing
import random
import re
import statistics
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from tqdm import tqdm

import envs

transformers.utils.logging.disable_progress_bar()


# ------------------------------------------------------------------------------------- settings
@dataclass
class Config:
    method: str = "fsd"  # fsd: GRPO + distillation; grpo: no distillation; distill: no GRPO
    model: str = ""  # chat model, by hub name or folder; empty: the embedded base model
    teacher: str = "frozen"  # weights that see the hint: frozen (initial) or live (current)
    out: str = "runs/fsd"  # output folder; overwrites what an earlier run left there
    base: str = ""  # folder that keeps the embedded base; empty: OUT/base
    seed: int = 0  # of the training tasks and their sampling, not of the base or the evaluation
    steps: int = 150  # one rollout and one update each
    tasks: int = 8  # tasks per step
    group: int = 8  # G, episodes per task
    wording: str = "plain"  # of the tasks: plain, or tags (it names the tool format)
    temperature: float = 1.0  # of sampling, and of every score
    max_tokens: int = 64  # sampled per turn; a longer reply is cut, and counted as truncated
    lr: float = 1e-4  # AdamW's learning rate after the warm-up
    warmup: int = 10  # steps of linear warm-up
    coef: float = 1.0  # weight of the distillation loss
    judge: str = "rule"  # who writes the hints: rule, or llm (a chat model)
    judge_model: str = ""  # of --judge llm, by hub name or folder; empty: the initial policy
    judge_noise: float = 0.0  # share of the judge's verdicts that are turned round
    feedback: str = "failed"  # turns that get a hint: failed, all, or as many at random
    kl: str = "forward"  # forward: KL(teacher || student); reverse: KL(student || teacher)
    show_hints: bool = False  # every turn's hint is in the policy's prompt too, in training
    bonus: float = 0.2  # reward of a behaviour, times its share of turns; success is worth 1
    eval_episodes: int = 512  # held-out tasks, one episode each
    eval_every: int = 0  # steps between evaluations during training; 0: only before and after
    sample_rows: int = 512  # replies sampled at once: bounds the memory of a rollout
    batch_tokens: int = 8192  # of a micro-batch with its padding: bounds the memory of an update
    checkpointing: bool = False  # recompute activations in the backward pass: slower, less memory
    compare: bool = False  # train all ARMS over seeds; reuses runs that have these settings
    quick: bool = False  # compare fewer arms
    seeds: int = 5  # to compare: 0, 1, ...

    def __post_init__(self):
        self.out = str(Path(self.out))  # without a trailing slash
        self.base = self.base or f"{self.out}/base"
        self.judge = "llm" if self.judge_model else self.judge
        choices = dict(method="fsd grpo distill", teacher="frozen live", judge="rule llm",
                       feedback="failed all random", kl="forward reverse",
                       wording="plain tags")
        at_least = dict(seed=0, steps=1, tasks=1, group=2, temperature=1e-6, max_tokens=1, lr=1e-12,
                        warmup=0, coef=0, judge_noise=0, bonus=0, eval_episodes=1,
                        eval_every=0, sample_rows=1, batch_tokens=1, seeds=1)
        for name, value in vars(self).items():
            if name in choices and value not in choices[name].split():
                raise ValueError(f"--{name} {value}: choose one of {choices[name]}")
            if name in at_least and not at_least[name] <= value < 2**63:
                raise ValueError(f"--{name} {value}: must be finite, at least {at_least[name]}")
        if self.judge_noise > 1:
            raise ValueError(f"--judge_noise {self.judge_noise}: a share is at most 1")
        if not self.compare and (self.quick or self.seeds != Config.seeds):
            raise ValueError("--quick and --seeds go with --compare")
        for name in {"seed"}.union(*ARMS.values()) if self.compare else ():
            if getattr(self, name) != getattr(Config, name):
                raise ValueError(f"--{name} {getattr(self, name)}: --compare sets it, see ARMS")
        if self.judge == "llm" and not (self.judge_model or self.model):
            raise ValueError("--judge llm: the embedded base cannot judge, pass --judge_model NAME")


# What --model changes of the defaults above; flags win over both.
PRETRAINED = dict(steps=16, tasks=4, group=4, wording="tags", temperature=0.7, max_tokens=96,
                  lr=3e-6, warmup=5, eval_episodes=64, sample_rows=64, batch_tokens=2048)


def parse_args(argv: list[str] | None) -> Config:
    """One flag per field of Config; the comment beside the field is the flag's help."""
    helps = dict(re.findall(r"(\w+): \w+ = .*?  # (.*)", inspect.getsource(Config)))
    parser = argparse.ArgumentParser("fsd.py", description=__doc__.split("\n\n")[1],
                                     allow_abbrev=False)
    for f in fields(Config):
        pretrained = f", with --model {PRETRAINED[f.name]!r}" if f.name in PRETRAINED else ""
        kind = dict(action="store_true") if f.type is bool else dict(type=f.type, default=f.default)
        parser.add_argument(f"--{f.name}", **kind,
                            help=f"{helps[f.name]} (default {f.default!r}{pretrained})")
    if parser.parse_args(argv).model:
        parser.set_defaults(**PRETRAINED)
    try:
        return Config(**vars(parser.parse_args(argv)))
    except ValueError as error:
        parser.error(str(error))


# -------------------------------------------------------------------------- model and tokenizer
@dataclass
class Policy:
    """A chat model and how it is sampled."""
    model: transformers.PreTrainedModel
    tokenizer: transformers.PreTrainedTokenizerBase
    stop_ids: set[int]
    max_context: int  # tokens of a prompt with its reply
    temperature: float
    max_tokens: int  # per reply
    sample_rows: int  # replies at once


def load_policy(name: str, cfg: Config, device: str) -> Policy:
    """A causal language model with a chat template, by hub name or folder. Exits with a message
    when it cannot be loaded, or fails in what training needs: its template, sampling, scoring.
    Half-precision weights become bf16 where the device computes in it, else float32."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        if not tokenizer.chat_template or tokenizer.eos_token_id is None:
            raise ValueError("no chat template or no stop token: choose a chat (instruct) model")
        model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype="auto")
        bf16 = model.dtype != torch.float32 and (
            torch.cuda.is_bf16_supported(including_emulation=False) if device == "cuda" else
            device == "cpu" and torch.cpu.get_capabilities().get("amx_bf16", False))
        stop = model.generation_config.eos_token_id or []
        stop_ids = {tokenizer.eos_token_id, *(stop if isinstance(stop, list) else [stop])}
        context = getattr(model.config, "max_position_embeddings", sys.maxsize)
        policy = Policy(model.float().to(device), tokenizer, stop_ids, context, cfg.temperature,
                        cfg.max_tokens, cfg.sample_rows)
        messages = [{"role": r, "content": "a b c"} for r in ("user", "assistant", "user")]
        prompts = [render(policy, messages[:1]), render(policy, messages, hint="d")]
        probe = replace(policy, temperature=1.0, max_tokens=8)
        replies, logprobs, _ = zip(*sample(probe, prompts, torch.Generator(device).manual_seed(0)))
        ids, logprobs = (torch.tensor(sum(x, []), device=device) for x in (replies, logprobs))
        scores = log_probs(model, torch.cat(score(model, prompts, replies)), 1.0)
        if not (scores.gather(1, ids[:, None])[:, 0] - logprobs).abs().max() < 1e-2:
            raise ValueError("its log-probs change with padding, or behind its output matrix: "
                             "this architecture cannot be scored here")
    except Exception as error:  # a model can fail in too many ways to list
        raise SystemExit(f"cannot use {name} as a chat model: {type(error).__name__}: {error}")
    if bf16:
        for p in model.parameters():  # not the buffers: rotary frequencies need float32
            p.data = p.data.bfloat16()
    return policy


# ------------------------------------------------------------------------------------- rollouts
@dataclass
class Turn:
    """One reply of the policy: the unit that is judged, scored and trained on."""
    task: envs.Task
    kind: str  # what the environment asked for: "edit" or "commit"
    messages: list[dict]  # the conversation before the reply, without a hint
    prompt: list[int]  # the ids that the policy saw
    ids: list[int]  # the ids that it sampled, the stop token included
    logprobs: list[float]  # of ids, under the distribution that they were sampled from
    entropies: list[float]  # of that distribution, in nats
    truncated: bool  # no stop token within max_tokens
    text: str
    shown: dict[str, bool]  # of the behaviours that apply to this turn: does it show them?
    hint: str | None = None  # the judge's: a turn with a hint is distilled
    hinted_prompt: list[int] = field(default_factory=list)  # the ids that the teacher sees
    advantage: float = 0.0  # of the episode that the turn belongs to

    @property
    def failed(self) -> bool:
        return not all(self.shown.values())


@dataclass
class Episode:
    env: envs.Repair
    messages: list[dict]
    turns: list[Turn] = field(default_factory=list)

    def reward(self, bonus: float) -> float:
        """Success is worth 1, a behaviour `bonus` times the share of its turns that show it."""
        return self.env.success + bonus * sum(rate or 0 for rate in rates(self.turns).values())


def render(policy: Policy, messages: list[dict], hint: str | None = None) -> list[int]:
    """The ids up to the policy's next reply, as the model's own chat template writes them."""
    messages = envs.with_hint(messages, hint)
    return policy.tokenizer.apply_chat_template(messages, add_generation_prompt=True,
                                                tokenize=True, return_dict=False)


@torch.no_grad()
def sample(policy: Policy, prompts: list[list[int]], generator: torch.Generator) -> list[tuple]:
    """(ids, logprobs, entropies) per prompt: ids ~ softmax(logits / temperature), to a stop token.

    Rows are padded on the left, so that all of them continue at the same column. Those that have
    stopped leave the batch once they are half of it."""
    if len(prompts) > policy.sample_rows:
        return [reply for i in range(0, len(prompts), policy.sample_rows)
                for reply in sample(policy, prompts[i:i + policy.sample_rows], generator)]
    if not prompts:
        return []
    model, width = policy.model, max(map(len, prompts))
    on_device = lambda rows: torch.tensor(rows, device=model.device)
    ids = on_device([[0] * (width - len(p)) + p for p in prompts])  # (B, T)
    mask = on_device([[0] * (width - len(p)) + [1] * len(p) for p in prompts])  # (B, T)
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # (B, T)
    cache = transformers.DynamicCache(config=model.config)
    replies = [([], [], []) for _ in prompts]
    rows = replies  # the reply that each row of the batch continues
    has_stopped = lambda reply: bool(reply[0]) and reply[0][-1] in policy.stop_ids
    model.eval()
    for _ in range(policy.max_tokens):
        output = model(input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache,
                       logits_to_keep=1)
        logp = F.log_softmax(output.logits[:, -1].float() / policy.temperature, dim=-1)  # (B, V)
        if logp.isnan().any():
            raise FloatingPointError("the model's logits are not finite, try a lower --lr")
        ids = torch.multinomial(logp.exp(), 1, generator=generator)  # (B, 1)
        entropies = -(logp.exp() * logp).sum(-1, keepdim=True)  # (B, 1)
        drawn = (x.tolist() for x in (ids, logp.gather(1, ids), entropies))
        for reply, *values in zip(rows, *drawn):
            if not has_stopped(reply):
                for column, value in zip(reply, values):
                    column += value
        live = [i for i, reply in enumerate(rows) if not has_stopped(reply)]
        if not live:
            break
        mask, positions = F.pad(mask, (0, 1), value=1), positions[:, -1:] + 1
        if len(live) <= len(rows) // 2:
            keep = on_device(live)
            cache.batch_select_indices(keep)
            ids, mask, positions = ids[keep], mask[keep], positions[keep]
            rows = [rows[i] for i in live]
    return replies


def rollout(policy: Policy, tasks: list[envs.Task], group: int, generator: torch.Generator,
            hinted: bool = False) -> list[Episode]:
    """`group` episodes of each task, one task after the other; all live ones in lock-step.

    With `hinted`, the policy sees every hint that could apply: are hints followed? An episode whose
    next turn would outgrow the model's context ends there."""
    envs_of_tasks = [envs.Repair(task) for task in tasks for _ in range(group)]
    episodes = [Episode(env, [{"role": "user", "content": env.first_message()}])
                for env in envs_of_tasks]
    live = episodes
    while live:
        hints = [envs.hints(e.env.task, e.env.kind) if hinted else None for e in live]
        prompts = [render(policy, e.messages, hint) for e, hint in zip(live, hints)]
        ready = [(episode, prompt) for episode, prompt in zip(live, prompts)
                 if len(prompt) + policy.max_tokens <= policy.max_context]
        replies = sample(policy, [prompt for _, prompt in ready], generator)
        live = []
        for (episode, prompt), (ids, logprobs, entropies) in zip(ready, replies):
            env, text = episode.env, policy.tokenizer.decode(ids, skip_special_tokens=True)
            episode.turns.append(Turn(
                env.task, env.kind, episode.messages, prompt, ids, logprobs, entropies,
                truncated=ids[-1] not in policy.stop_ids, text=text,
                shown=envs.shown(env.task, env.kind, text)))
            observation = env.step(text)
            if observation is not None:
                episode.messages = episode.messages + [{"role": "assistant", "content": text},
                                                       {"role": "user", "content": observation}]
                live.append(episode)
    return episodes


# ---------------------------------------------------------------------------- judge and teacher
# A judge gives for each turn: a hint if it failed, None if it is good, "" if it cannot tell.
def rule_judge(turns: list[Turn]) -> list[str | None]:
    return [envs.hints(turn.task, turn.kind, turn.text) for turn in turns]


def llm_judge(judge: Policy, turns: list[Turn]) -> list[str | None]:
    """A chat model reads each turn's text and the rules of the behaviours that apply to it."""
    judge, prompts = replace(judge, temperature=1e-6, max_tokens=64), []  # as good as greedy
    for turn in turns:
        rule = " ".join(b.rule(turn.task) for b in envs.BEHAVIOURS if b.kind == turn.kind)
        content = envs.JUDGE_PROMPT.replace("RULE", rule).replace("REPLY", turn.text)
        prompts.append(render(judge, [{"role": "user", "content": content}]))
    fits = [len(prompt) + judge.max_tokens <= judge.max_context for prompt in prompts]
    answers = iter(sample(judge, [p for p, fit in zip(prompts, fits) if fit],
                          torch.Generator(judge.model.device)))
    replies = [next(answers)[0] if fit else [] for fit in fits]
    return [envs.read_verdict(judge.tokenizer.decode(ids, skip_special_tokens=True))
            if judge.stop_ids.intersection(ids) else "" for ids in replies]  # "" if it was cut


def altered(judge, cfg: Config):
    """For comparison: hints on other turns than the failed ones, or verdicts turned round."""
    rng = random.Random(cfg.seed)

    def altered_judge(turns: list[Turn]) -> list[str | None]:
        verdicts = judge(turns)
        hinted = [bool(verdict) or cfg.feedback == "all" for verdict in verdicts]
        if cfg.feedback == "random":
            rng.shuffle(hinted)  # as many as had failed
        hinted = [yes != (rng.random() < cfg.judge_noise) for yes in hinted]
        # a good turn's verdict holds no hint; an unusable one stays unusable
        hints = [verdict or envs.hints(t.task, t.kind) for verdict, t in zip(verdicts, turns)]
        return [verdict if verdict == "" else hint if yes else None
                for verdict, hint, yes in zip(verdicts, hints, hinted)]
    return altered_judge


def attach_hints(policy: Policy, turns: list[Turn], verdicts: list[str | None]) -> dict:
    """The teacher's view of the failed turns; returns how well the judge agrees with the rules. A
    hint that the model's context cannot hold is dropped: the teacher never reads what was cut."""
    for turn, hint in zip(turns, verdicts):
        if hint:
            hinted_prompt = render(policy, turn.messages, hint)
            if len(hinted_prompt) + len(turn.ids) <= policy.max_context:
                turn.hint, turn.hinted_prompt = hint, hinted_prompt
    return {"judge_unusable": mean(verdict == "" for verdict in verdicts),
            "judge_precision": mean(t.failed for t, verdict in zip(turns, verdicts) if verdict),
            "judge_recall": mean(bool(verdict) for t, verdict in zip(turns, verdicts) if t.failed)}


# --------------------------------------------------------------------------------------- losses
def group_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """A_i = (r_i - mean_g) / std_g  over the episodes of i's group g, 0 where all rewards are equal

    (groups, G) -> (groups, G). GRPO (arXiv 2402.03300), section 4.1; population std."""
    flat = rewards.amax(1, keepdim=True) == rewards.amin(1, keepdim=True)
    centred = rewards - rewards.mean(1, keepdim=True)
    return (centred / rewards.std(1, correction=0, keepdim=True)).masked_fill(flat, 0.0)


def grpo_loss(logprobs, old_logprobs, advantages, clip: float = 0.2) -> torch.Tensor:
    """-sum_j min(rho_j A_j, clip(rho_j, 1 - e, 1 + e) A_j),  rho_j = exp(logprob_j - old_logprob_j)

    All (n,), or one advantage for all -> scalar. GRPO (arXiv 2402.03300), eq. 3 without its KL term
    and its mean over each reply: every token of the step weighs the same. At rho = 1 the value says
    nothing of progress; the gradient on logprob_j is -A_j."""
    ratio = (logprobs - old_logprobs).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages).sum()


def distill_loss(student_logprobs, teacher_logprobs) -> torch.Tensor:
    """sum_j KL(q_j || p_j) = sum_j sum_v q_j(v) (log q_j(v) - log p_j(v)),  no gradient through q

    p is the student, q the teacher. Both log-probs (n, V), a row per sampled token of a failed
    turn -> scalar. In this direction the gradient at the student's softmax is p - q, however
    unlikely the student finds what the teacher proposes; that of KL(p || q) vanishes there."""
    return F.kl_div(student_logprobs, teacher_logprobs.detach(), reduction="sum", log_target=True)


def reverse_distill_loss(student_logprobs, teacher_logprobs) -> torch.Tensor:
    """sum_j KL(p_j || q_j), for comparison: a logit's gradient carries a factor p_j(v)."""
    return F.kl_div(teacher_logprobs.detach(), student_logprobs, reduction="sum", log_target=True)


# --------------------------------------------------------------------------------------- update
def score(model, prompts: list[list[int]], replies: list[list[int]]) -> tuple[torch.Tensor, ...]:
    """Per reply, the (n, H) hidden states that predict its n tokens.

    Rows are padded on the right, where causal attention never looks, so no mask is needed. The
    token in column j is predicted in column j - 1. Without dropout: before the update, every ratio
    must be 1."""
    width = max(len(p) + len(r) for p, r in zip(prompts, replies))
    ids = [p + r + [0] * (width - len(p) - len(r)) for p, r in zip(prompts, replies)]
    for module in model.modules():  # transformers checkpoints layers in training mode only
        module.training = getattr(module, "gradient_checkpointing", False)
    hidden = model.base_model(input_ids=torch.tensor(ids, device=model.device),
                              use_cache=False).last_hidden_state  # (B, T, H)
    return tuple(h[len(p) - 1:len(p) + len(r) - 1] for h, p, r in zip(hidden, prompts, replies))


def log_probs(model, hidden: torch.Tensor, temperature: float) -> torch.Tensor:
    """(n, H) -> (n, V), of the distribution that is sampled from, in float32."""
    logits = model.get_output_embeddings()(hidden).float()
    return F.log_softmax(logits / temperature, dim=-1)


def micro_batches(turns: list[Turn], batch_tokens: int):
    """Turns of similar length together, as many as the token budget holds with their padding."""
    width = lambda turn: max(len(turn.prompt), len(turn.hinted_prompt)) + len(turn.ids)
    turns = sorted(turns, key=width)
    while turns:
        n = max(1, batch_tokens // width(turns[-1]))
        yield turns[-n:]
        del turns[-n:]


def backward(policy: Policy, teacher, batch: list[Turn], total: int, cfg: Config, stats: dict):
    """Adds the gradient of L over a micro-batch to the policy's, and its values to the statistics.

    V is large, so logits exist for one turn at a time. Each turn leaves its gradient on the hidden
    states; from there, one pass for the whole batch goes back through the model."""
    kl = distill_loss if cfg.kl == "forward" else reverse_distill_loss
    hidden = score(policy.model, [t.prompt for t in batch], [t.ids for t in batch])
    taught = [t for t in batch if t.hint]
    with torch.no_grad():
        teacher_hidden = iter(score(teacher, [t.hinted_prompt for t in taught],
                                    [t.ids for t in taught]) if taught else ())
    leaves = [h.detach().requires_grad_() for h in hidden]
    for turn, leaf in zip(batch, leaves):
        ids, old_logprobs = (torch.tensor(x, device=leaf.device) for x in (turn.ids, turn.logprobs))
        student = log_probs(policy.model, leaf, cfg.temperature)  # (n, V)
        logprobs = student.gather(1, ids[:, None])[:, 0]  # (n,)
        rl = grpo_loss(logprobs, old_logprobs, turn.advantage) / total
        distill = torch.zeros_like(rl)
        if turn.hint:
            with torch.no_grad():
                hinted = log_probs(teacher, next(teacher_hidden), cfg.temperature)
            distill = kl(student, hinted) / total
        (rl + cfg.coef * distill).backward()
        stats["grpo_loss"] += rl.item()
        stats["distill_loss"] += distill.item()
        stats["max_logprob_gap"] = max(stats["max_logprob_gap"],
                                       (logprobs - old_logprobs).abs().max().item())
        stats["update_tokens"] += len(turn.prompt) + len(turn.ids)
    torch.autograd.backward(hidden, [leaf.grad for leaf in leaves])


def update(policy: Policy, teacher, optimizer, turns: list[Turn], cfg: Config) -> dict:
    """One AdamW step on L = (L_grpo + coef * L_distill) / N, N = all sampled tokens of the step.

    The gradient's norm is clipped at 1. Turns with neither an advantage nor a hint have no gradient
    and are not scored. The optimizer holds the policy's weights in float32, see `train`."""
    total = sum(len(t.ids) for t in turns)  # N: counted once, before the micro-batches
    stats = dict(grpo_loss=0.0, distill_loss=0.0, max_logprob_gap=0.0, update_tokens=0)
    weights = list(zip(optimizer.param_groups[0]["params"], policy.model.parameters()))
    optimizer.zero_grad(set_to_none=True)  # None, and not 0, keeps AdamW from moving a weight
    for batch in micro_batches([t for t in turns if t.advantage or t.hint], cfg.batch_tokens):
        backward(policy, teacher, batch, total, cfg, stats)
        for w, p in weights:  # micro-batches are summed in float32
            if p.grad is not None:
                w.grad = p.grad.float() if w.grad is None else w.grad + p.grad
                p.grad = None
    norm = torch.nn.utils.clip_grad_norm_([w for w, _ in weights], max_norm=1.0)
    if not norm.isfinite():
        raise FloatingPointError("the gradient is not finite, try a lower --lr")
    optimizer.step()
    for w, p in weights:
        p.data.copy_(w)
    return {**stats, "grad_norm": norm.item()}


def train_step(policy: Policy, teacher, judge, optimizer, rng: random.Random,
               generator: torch.Generator, cfg: Config) -> dict:
    """Steps 1 to 6 of the algorithm, once; returns the step's metrics."""
    start = time.perf_counter()
    tasks = [envs.make_task(rng.randrange(envs.HELD_OUT), cfg.wording) for _ in range(cfg.tasks)]
    episodes = rollout(policy, tasks, cfg.group, generator, cfg.show_hints)
    turns = [turn for episode in episodes for turn in episode.turns]
    verdicts = judge(turns) if cfg.method != "grpo" else [None] * len(turns)
    rollout_end = time.perf_counter()
    judged = attach_hints(policy, turns, verdicts)
    rewards = torch.tensor([e.reward(cfg.bonus) for e in episodes], dtype=torch.float64)
    advantages = group_advantages(rewards.view(cfg.tasks, cfg.group))
    if cfg.method != "distill":
        for episode, advantage in zip(episodes, advantages.flatten().tolist()):
            for turn in episode.turns:  # every turn carries its episode's advantage
                turn.advantage = advantage
    stats = update(policy, teacher, optimizer, turns, cfg)
    return {**figures(episodes, cfg), **judged, **stats,
            "turns_hinted": mean(bool(t.hint) for t in turns),
            "tokens_distilled": mean(bool(t.hint) for t in turns for _ in t.ids),
            "flat_groups": mean(not group.any() for group in advantages),
            "rollout_tokens": sum(len(t.prompt) + len(t.ids) for t in turns),
            "rollout_s": rollout_end - start, "update_s": time.perf_counter() - rollout_end}


# ------------------------------------------------------------------------------------ seeing it
def mean(values) -> float | None:  # None for no values, such as the entropy of no turns
    values = list(values)
    return sum(values) / len(values) if values else None


def rates(turns: list[Turn]) -> dict[str, float | None]:
    """Per behaviour, the share of the turns it applies to that show it."""
    return {b.name: mean(t.shown[b.name] for t in turns if b.name in t.shown)
            for b in envs.BEHAVIOURS}


def figures(episodes: list[Episode], cfg: Config) -> dict:
    """Means over episodes, turns or tokens; some also over failed and over passed turns alone."""
    turns = [turn for episode in episodes for turn in episode.turns]
    result = {"reward": mean(e.reward(cfg.bonus) for e in episodes),
              "success": mean(e.env.success for e in episodes), **rates(turns),
              "truncated": mean(t.truncated for t in turns),
              "reasoning": mean(len(re.split("```|<patch>|def ", t.text)[0].split())
                                for t in turns if t.kind == "edit")}  # words before the code
    for suffix, some in (("", turns), ("_failed", [t for t in turns if t.failed]),
                         ("_passed", [t for t in turns if not t.failed])):
        result["entropy" + suffix] = mean(h for t in some for h in t.entropies)
        result["reply_tokens" + suffix] = mean(len(t.ids) for t in some)
    return result


def evaluate(policy: Policy, cfg: Config, hinted: bool = False, reworded: bool = False):
    """(figures, episodes) on the held-out tasks, always with the same seed, by default unhinted."""
    wording = "other" if reworded else cfg.wording
    tasks = [envs.make_task(envs.HELD_OUT + i, wording) for i in range(cfg.eval_episodes)]
    generator = torch.Generator(policy.model.device).manual_seed(0)
    episodes = rollout(policy, tasks, 1, generator, hinted)
    return {**figures(episodes, cfg), "episodes": len(episodes)}, episodes


@torch.no_grad()
def transcript(title: str, episode: Episode, policy: Policy, teacher) -> str:
    """The episode as a conversation. In failed turns it marks the tokens where the teacher, who
    sees the hint, is over one nat of KL from the policy; where the most, it gives both views."""
    opening, closing = ("\033[7m", "\033[0m") if sys.stdout.isatty() else ("[[", "]]")
    decode, said = policy.tokenizer.decode, []
    attach_hints(policy, episode.turns, rule_judge(episode.turns))
    for turn in episode.turns:
        said += [("user", turn.messages[-1]["content"]), ("policy", turn.text)]
        if turn.hint:
            views = (policy.model, turn.prompt), (teacher, turn.hinted_prompt)
            student, hinted = (log_probs(model, *score(model, [prompt], [turn.ids]),
                                         policy.temperature) for model, prompt in views)
            kl = F.kl_div(student, hinted, reduction="none", log_target=True).sum(-1)  # (n,)
            marked = "".join(f"{opening}{decode([i])}{closing}" if nats > 1 else decode([i])
                             for i, nats in zip(turn.ids, kl) if i not in policy.stop_ids)
            without, after = (", ".join(f"{decode([i])!r} {p:.2f}" for p, i in zip(*x.topk(2)))
                              for x in (student[kl.argmax()].exp(), hinted[kl.argmax()].exp()))
            said[-1:] = ("policy", marked), ("(hint)", f"{turn.hint}\n{without} -> {after}")
    lines = [f"\n{f' {title} ':-^80}"]
    for who, text in [*said, ("", f"(the tests {'pass' if episode.env.success else 'fail'})")]:
        parts = [part for line in text.split("\n") for part in textwrap.wrap(line, 70) or [""]]
        lines += [f"{name:>7}  {part}" for name, part in zip([who] + [""] * len(parts), parts)]
    return "\n".join(lines)


COLUMNS = {"success": "success", **{b.name: b.name for b in envs.BEHAVIOURS},
           "turns_hinted": "taught", "distill_loss": "distill", "flat_groups": "flat",
           "entropy": "entropy", "reply_tokens": "tokens"}  # metric -> its title in the table
HEADER = f"\n{'':8}" + "".join(f"{title:>9}" for title in COLUMNS.values())


def row(title, metrics: dict) -> str:
    values = [metrics.get(name) for name in COLUMNS]
    return f"{title:>8}" + "".join(f"{'-' if v is None else f'{v:.3f}':>9}" for v in values)


# ----------------------------------------------------------------------------------------- main
def train(policy: Policy, teacher, judge, cfg: Config, metrics_file) -> BaseException | None:
    """Trains the policy in place; returns what ended it early, if anything did."""
    # float32, also for a model in bf16, whose 8 bits lose a step of 1e-6 on a weight of 0.01
    weights = [p.detach().float() for p in policy.model.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=cfg.lr, weight_decay=0.0)
    rng = random.Random(cfg.seed)
    generator = torch.Generator(policy.model.device).manual_seed(cfg.seed)
    try:
        for step in (progress := tqdm(range(1, cfg.steps + 1), cfg.method, disable=None, ncols=80)):
            optimizer.param_groups[0]["lr"] = cfg.lr * min(1.0, step / max(cfg.warmup, 1))
            metrics = train_step(policy, teacher, judge, optimizer, rng, generator, cfg)
            metrics = {"step": step, **metrics}
            if step % 10 == 0 or step in (1, cfg.steps):
                tqdm.write(row(step, metrics))
            if not metrics["update_tokens"]:
                tqdm.write(f"{step:>8}  no turn has a hint or an advantage: update skipped")
            if cfg.eval_every and step % cfg.eval_every == 0 and step < cfg.steps:
                metrics["held_out"], _ = evaluate(policy, cfg)
                tqdm.write(row("held-out", metrics["held_out"]))
            print(json.dumps(metrics), file=metrics_file, flush=True)
            progress.set_postfix({name: metrics[name] for name in list(COLUMNS)[:3]})
    except (KeyboardInterrupt, OSError, FloatingPointError, torch.OutOfMemoryError) as error:
        progress.close()
        return error


def run(cfg: Config) -> BaseException | None:
    """Evaluates, trains, evaluates, into the folder OUT; returns what ended it early, if any."""
    out = Path(cfg.out)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = accelerator.type if accelerator else "cpu"
    policy = load_policy(cfg.model or envs.embedded_base(cfg.base, device), cfg, device)
    initial = policy  # copied where the initial weights are needed later on
    llm_is_policy = cfg.judge == "llm" and not cfg.judge_model
    if cfg.method != "grpo" and (cfg.teacher == "frozen" or llm_is_policy):
        initial = replace(policy, model=copy.deepcopy(policy.model))
    teacher = initial.model if cfg.teacher == "frozen" else policy.model
    judge_policy = initial
    if cfg.judge_model and cfg.method != "grpo":
        judge_policy = load_policy(cfg.judge_model, cfg, device)
    judge = rule_judge if cfg.judge == "rule" else lambda turns: llm_judge(judge_policy, turns)
    judge = altered(judge, cfg)
    if cfg.checkpointing:
        policy.model.activation_checkpointing_enable()

    print(f"evaluating on {cfg.eval_episodes} held-out tasks: as they are, with hints, in other "
          f"words\n{HEADER}")
    before, episodes = evaluate(policy, cfg)
    print(row("before", before))
    hinted, _ = evaluate(policy, cfg, hinted=True)
    print(row("hinted", hinted))
    reworded, _ = evaluate(policy, cfg, reworded=True)
    print(row("reworded", reworded))
    if before["reply_tokens"] is None:
        raise SystemExit(f"--max_tokens {cfg.max_tokens}: the context of the model is too short")
    for b in envs.BEHAVIOURS:
        if (before[b.name] or 0) > 0.05:
            print(f"{b.name} is not neglected: {before[b.name]:.0%} of its turns show it unasked")
        if (hinted[b.name] or 0) < 0.5:
            print(f"{b.name} is not teachable: {hinted[b.name] or 0:.0%} of its hints are followed")

    shown_before = transcript("before", episodes[0], policy, policy.model)
    (out / "summary.json").unlink(missing_ok=True)  # an earlier run's
    with (out / "metrics.jsonl").open("w") as metrics_file:
        stopped = train(policy, teacher, judge, cfg, metrics_file)
    for part in (policy.model, policy.tokenizer):
        part.save_pretrained(out / "policy")
    summary = dict(config=asdict(cfg), before=before, hinted=hinted, reworded_before=reworded,
                   after=None, reworded_after=None)
    try:
        if not stopped:
            summary["after"], episodes = evaluate(policy, cfg)
            print(row("after", summary["after"]))
            summary["reworded_after"], _ = evaluate(policy, cfg, reworded=True)
            print(row("reworded", summary["reworded_after"]))
            print(shown_before, transcript("after", episodes[0], policy, teacher), sep="\n")
    except (KeyboardInterrupt, FloatingPointError, torch.OutOfMemoryError) as error:
        stopped = error
    summary["stopped"] = stopped and type(stopped).__name__
    (out / "summary.json").write_text(json.dumps(summary, indent=1))
    if stopped:
        print(f"stopped early, see {out}: {type(stopped).__name__} {stopped}")
        return stopped
    print(f"\nwritten to {out}: metrics.jsonl, summary.json, policy/")


# --------------------------------------------------------------------------------- the evidence
# An arm is a run that differs from the default one in what is named here, and only there.
ARMS = {"grpo": dict(method="grpo"), "distill": dict(method="distill"), "fsd": {},
        "all": dict(feedback="all"), "random": dict(feedback="random"),
        "live": dict(teacher="live"), "all-live": dict(feedback="all", teacher="live"),
        "reverse": dict(kl="reverse"), "shown": dict(show_hints=True)}
QUICK = ["grpo", "distill", "fsd", "all"]
CURVES = ["success", *(b.name for b in envs.BEHAVIOURS)]
# Half the width of a 95 % interval in standard errors (Student's t), by the number of seeds
STUDENT_T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}


def finished(cfg: Config) -> bool:
    """Has this run, with these settings, got to its last evaluation, or diverged, and is it younger
    than the models that it used? Code that has changed since goes unnoticed: take another OUT."""
    summary, models = Path(cfg.out, "summary.json"), [Path(cfg.base, "made_with.json")]
    for folder in filter(None, (cfg.model, cfg.judge_model)):
        models += Path(folder).glob("*")  # none of a model by its hub name
    try:
        found = json.loads(summary.read_text())
        ended = found["reworded_after"] is not None or found["stopped"] == "FloatingPointError"
        return ended and found["config"] == asdict(cfg) and all(
            f.stat().st_mtime < summary.stat().st_mtime for f in models if f.exists())
    except (OSError, ValueError, KeyError):  # no run yet, or a damaged file
        return False


def run_arm(cfg: Config) -> dict:
    """The run's summary and curves: from its folder if it has finished there, else by running it
    in this process, with its output in log.txt. What a diverged run does not have counts as 0."""
    out = Path(cfg.out)
    if not finished(cfg):
        out.mkdir(exist_ok=True)
        if not (cfg.model or cfg.judge_model):
            torch.set_num_threads(1)  # the other cores have runs of their own
        with (out / "log.txt").open("w", errors="replace") as log:
            with redirect_stdout(log), redirect_stderr(log):
                stopped = run(cfg)
        if stopped and not isinstance(stopped, FloatingPointError):
            raise stopped
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps += [dict.fromkeys(CURVES)] * (cfg.steps - len(steps))
    return {**json.loads((out / "summary.json").read_text()),
            "curves": {name: [step[name] or 0.0 for step in steps] for name in CURVES}}


def outcomes(after: dict | None, reworded: dict | None, success_curve: list[float]) -> dict:
    """A run's columns of the tables; ' is for tasks in other words, "worst" the lowest success
    over five consecutive steps of training."""
    windows = [success_curve[i:i + 5] for i in range(max(1, len(success_curve) - 4))]
    names = [*CURVES, "entropy", "reply_tokens", "reasoning"]
    return {**{name: (after or {}).get(name) for name in names}, "worst": min(map(mean, windows)),
            **{f"{name}'": (reworded or {}).get(name) for name in CURVES}}


def interval(values: list[float | None]) -> str:
    """Mean ± half its 95 % interval over training seeds (base and held-out tasks are the same for
    all); - where a run has no value."""
    if None in values:
        return "-"
    digits = 2 if mean(values) < 10 else 1
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    half = STUDENT_T.get(len(values), 2.26) * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean(values):.{digits}f}±{half:.{digits}f}"


def blocks(runs: list[dict], name: str, n: int) -> list[float]:
    """A curve of the training rollouts, mean over the runs and over each of n blocks of steps."""
    curve = [mean(values) for values in zip(*(run["curves"][name] for run in runs))]
    cuts = [i * len(curve) // n for i in range(n + 1)]
    return [mean(curve[a:b]) for a, b in zip(cuts, cuts[1:]) if a < b]


def report(results: dict[str, list[dict]]):
    first, bars = results["fsd"][0], " ▁▂▃▄▅▆▇█"
    rows = {"base": [outcomes(first["before"], first["reworded_before"], success_curve=[])],
            **{arm: [outcomes(run["after"], run["reworded_after"], run["curves"]["success"])
                     for run in runs] for arm, runs in results.items()}}
    names = list(rows["base"][0])
    for columns in names[:-len(CURVES)], names[-len(CURVES):]:
        print(f"\n{'':8}" + "".join(f"{name.removeprefix('reply_'):>10}" for name in columns))
        for arm, seeds in rows.items():
            cells = (interval([seed[name] for seed in seeds]) for name in columns)
            print(f"{arm:8}" + "".join(f"{cell:>10}" for cell in cells))
    print(f"\n{'':8}" + "".join(f"{name:>22}" for name in CURVES))
    for arm, runs in results.items():
        curves = ([bars[int(8.99 * v)] for v in blocks(runs, name, 20)] for name in CURVES)
        print(f"{arm:8}" + "".join(f"{''.join(curve):>22}" for curve in curves))


def chart(results: dict[str, list[dict]]) -> str:
    """The curves of fsd, and the first behaviour's of grpo, as a Mermaid chart for a README."""
    chosen = [("fsd", name) for name in CURVES] + [("grpo", CURVES[1])]
    lines = [[round(v, 2) for v in blocks(results[arm], name, 15)] for arm, name in chosen]
    colours = '{"themeVariables": {"xyChart": {"plotColorPalette": "green, blue, orange, gray"}}}'
    return "\n".join(["```mermaid", f"%%{{init: {colours}}}%%", "xychart-beta",
                      '    x-axis "share of the training" 0 --> 1', '    y-axis "rate" 0 --> 1',
                      *(f"    line {line}" for line in lines), "```"])


def picture(results: dict[str, list[dict]], path: Path):
    """The training curves of all arms, means and ranges over seeds, where matplotlib is there."""
    try:
        from matplotlib import pyplot
    except ImportError:
        return print("\nno curves.png: matplotlib is not installed")
    figure, axes = pyplot.subplots(1, len(CURVES), figsize=(15, 4), sharey=True)
    for axis, name in zip(axes, CURVES):
        for arm, runs in results.items():
            curves = torch.tensor([blocks([run], name, 30) for run in runs])  # (seeds, blocks)
            axis.plot(curves.mean(0), label=arm)
            axis.fill_between(range(curves.shape[1]), curves.amin(0), curves.amax(0), alpha=0.2)
        axis.set(title=name, xlabel="thirtieths of the training")
    axes[0].legend()
    figure.savefig(path)


def compare(cfg: Config):
    """Trains each arm with each seed, a process per core (as torch counts them: OMP_NUM_THREADS),
    and reports what came of it."""
    out = Path(cfg.out)
    names = QUICK if cfg.quick else list(ARMS)
    default = replace(cfg, compare=False, quick=False, seeds=Config.seeds)
    runs = [replace(default, **ARMS[arm], seed=seed, out=str(out / f"{arm}-{seed}"))
            for seed in range(cfg.seeds) for arm in names]
    if not cfg.model:
        envs.embedded_base(cfg.base, "cpu")  # once, and not in every process
    large = cfg.model or cfg.judge_model  # memory holds one
    processes = 1 if large else torch.get_num_threads()
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(run_arm, run) for run in runs]
        try:
            done = [f.result() for f in tqdm(futures, "runs", disable=None, ncols=80)]
        except BaseException:  # the pool would wait for runs that it has already queued
            for process in multiprocessing.active_children():
                process.kill()
            raise
    results = {arm: done[i::len(names)] for i, arm in enumerate(names)}
    (out / "compare.json").write_text(json.dumps(results))
    (out / "chart.md").write_text(chart(results))
    report(results)
    picture(results, out / "curves.png")
    print(f"written to {out}: compare.json, chart.md, and a folder for each run")


def main(argv: list[str] | None = None):
    cfg = parse_args(argv)
    for name in ("base", "model", "judge_model"):
        start = Path(getattr(cfg, name)).resolve()
        if start.name == "policy" and start.is_relative_to(Path(cfg.out).resolve()):
            raise SystemExit(f"--{name} {start}: --out {cfg.out} writes there, choose another")
    try:  # before any work
        for folder in [cfg.out] if cfg.model else [cfg.out, cfg.base]:
            Path(folder).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise SystemExit(f"cannot write to {error.filename}: {error.strerror}")
    stopped = compare(cfg) if cfg.compare else run(cfg)
    if stopped:
        sys.exit(130 if isinstance(stopped, KeyboardInterrupt) else 1)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a model may write what the terminal cannot show
    try:
        main()
    except KeyboardInterrupt:  # what was finished is saved
        sys.exit(130)
