"""Feedback self-distillation (FSD) in one file: a language-model agent learns behaviours that it never
shows by itself, because the same model with a hint in its context teaches the turns that failed.

The algorithm, and the function that does each step:
  1. rollout        the policy plays G episodes per task, several turns each, with no hint in sight
  2. rule_judge     a judge reads every turn and writes a short hint for each one that failed
  3. attach_hints   the teacher's view: the same conversation with the hint behind its last message
  4. group_advantages, grpo_loss    the standard RL part: reward against the other episodes of the task
  5. distill_loss   on the failed turns only: the policy without the hint is pulled to the teacher,
                    which scores the very same sampled tokens with the hint in its context
  6. update         L = L_grpo + coef * L_distill over all sampled tokens, one AdamW step
  7. evaluate       held-out tasks, no hints: the behaviours must have moved into the weights

Symbols: B turns in a batch, T tokens of a row, N sampled tokens, V vocabulary entries, H hidden size,
G episodes per task. A turn is (prompt ids, sampled ids). Only sampled ids are ever scored, as sampled.

The paper's public digest gives the idea but no formulas. Our choices: the failed turn itself is scored
again (there is no second rollout); the loss is KL(teacher || student) over the full vocabulary; it is
divided by all sampled tokens, so that it fades as failures do; the teacher is the initial model.

    python fsd.py                                    the embedded base model, a few minutes on a CPU
    python fsd.py --method grpo --out runs/grpo      the same without distillation
    python fsd.py --model NAME_OR_FOLDER             a pretrained chat model
    python fsd.py --help                             all settings
"""
import argparse
import copy
import hashlib
import inspect
import json
import math
import random
import re
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import (AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaConfig, LlamaForCausalLM,
                          PreTrainedTokenizerFast)

import envs

transformers.utils.logging.disable_progress_bar()


# -------------------------------------------------------------------------------------- settings
@dataclass
class Config:
    method: str = "fsd"  # fsd: GRPO + distillation; grpo: no distillation; distill: no GRPO
    model: str = ""  # chat model, by hub name or folder; empty: the embedded base model
    teacher: str = "frozen"  # weights that see the hint: frozen (the initial ones) or live (today's)
    out: str = "runs/fsd"  # output folder; an earlier run's results in it are overwritten
    base: str = ""  # folder that keeps the embedded base between runs; empty: OUT/base
    seed: int = 0  # of the training tasks and of sampling; the base and the evaluation do not depend on it
    steps: int = 80  # updates; one rollout each
    tasks: int = 8  # tasks per step
    group: int = 8  # G, episodes per task
    temperature: float = 1.0  # of sampling and of every score
    max_tokens: int = 64  # sampled per turn; a longer reply is cut and counted as truncated
    lr: float = 1e-4  # AdamW's learning rate after the warm-up
    warmup: int = 10  # steps of linear warm-up
    coef: float = 1.0  # weight of the distillation loss
    bonus: float = 0.2  # reward for showing a behaviour throughout; success is worth 1
    clip: float = 0.2  # GRPO's bound on the probability ratio
    eval_episodes: int = 512  # held-out tasks, one episode each
    batch_tokens: int = 8192  # of a micro-batch, padding included; bounds the memory of an update

    def __post_init__(self):
        choices = {"method": ("fsd", "grpo", "distill"), "teacher": ("frozen", "live")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"--{name} {getattr(self, name)}: choose one of {', '.join(allowed)}")
        lowest = dict(seed=0, steps=1, tasks=1, group=2, max_tokens=1, warmup=0, coef=0, bonus=0, clip=0,
                      eval_episodes=1, batch_tokens=1)
        for name, low in lowest.items():
            if not low <= getattr(self, name) < math.inf:
                raise ValueError(f"--{name} {getattr(self, name)}: must be at least {low}")
        for name in ("temperature", "lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"--{name} {getattr(self, name)}: must be above 0")


def parse_args(argv: list[str] | None) -> Config:
    """One flag per field of Config; the comment beside the field is the flag's help."""
    helps = dict(re.findall(r"(\w+): \w+ = .*?  # (.*)", inspect.getsource(Config)))
    parser = argparse.ArgumentParser(prog="fsd.py", allow_abbrev=False, description=__doc__.partition("\n\n")[0])
    for f in fields(Config):
        parser.add_argument(f"--{f.name}", type=f.type, default=f.default, help=f"{helps[f.name]} [{f.default}]")
    try:
        return Config(**vars(parser.parse_args(argv)))
    except ValueError as error:
        parser.error(str(error))


# --------------------------------------------------------------------------- model and tokenizer
@dataclass
class Policy:
    """A chat model and how it is sampled."""
    model: transformers.PreTrainedModel
    tokenizer: transformers.PreTrainedTokenizerBase
    temperature: float
    max_tokens: int

    @property
    def stop_ids(self) -> list[int]:
        stop = self.model.generation_config.eos_token_id or []
        return sorted({*(stop if isinstance(stop, list) else [stop]), self.tokenizer.eos_token_id})

    @property
    def max_context(self) -> int:
        return getattr(self.model.config, "max_position_embeddings", sys.maxsize)


def load_policy(name: str, cfg: Config, device: str) -> Policy:
    """A causal language model with a chat template, by hub name or folder. Exits with a message when
    there is none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise SystemExit(f"--model {name}: no causal language model there that can be loaded.\n{error}")
    if not tokenizer.chat_template or tokenizer.eos_token_id is None:
        raise SystemExit(f"--model {name}: the tokenizer needs a chat template and a stop token; "
                         "choose a chat (instruct) model.")
    return Policy(model.to(device).eval(), tokenizer, cfg.temperature, cfg.max_tokens)


# The embedded base stands in for a post-trained LLM: it solves the task sometimes, follows hints, and
# never shows the behaviours unasked. "Pre-training" shows it both formats, "post-training" the habit only.
BASE = dict(seed=0, init=0.02, full=1, vocab=512, hidden=128, layers=3, heads=4, steps=300, batch=32, lr=2e-3, pretraining=0.7)
TEMPLATE = ("{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}")


def base_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-pair encoding that never merges across words or symbols, so that new code splits the same."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"```| ?\w+| ?[^\w\s]|\s"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=BASE["vocab"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]))
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<|pad|>", eos_token="<|end|>",
                                   chat_template=TEMPLATE)


def base_demonstrations() -> list[list[tuple]]:
    """One batch of demonstrations per training step, the same at every call."""
    rng = random.Random(BASE["seed"])
    switch = BASE["steps"] * BASE["pretraining"]
    return [[envs.demonstration(rng, unasked=0.5 if step < switch else 0.0) for _ in range(BASE["batch"])]
            for step in range(BASE["steps"])]


def train_base(batches: list[list[tuple]], cfg: Config, device: str) -> Policy:
    """Supervised training of a small Llama on the expert's turns: only the replies are scored."""
    torch.manual_seed(BASE["seed"])
    tokenizer = base_tokenizer([m["content"] for b in batches[:100] for d in b for m in with_hint(*d[:2])]
                               + [reply for b in batches[:100] for _, _, reply in b])
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=BASE["hidden"], intermediate_size=3 * BASE["hidden"],
        num_hidden_layers=BASE["layers"], num_attention_heads=BASE["heads"], tie_word_embeddings=True,
        max_position_embeddings=512, initializer_range=BASE["init"], bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id)).to(device)
    policy = Policy(model.eval(), tokenizer, cfg.temperature, cfg.max_tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=BASE["lr"], betas=(0.9, 0.95))
    shape = lambda step: min(1.0, (step + 1) / 20, 2 * (1 - step / BASE["steps"]))  # warm-up, plateau, decay
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, shape)
    progress = tqdm(batches, "training the base", disable=None, ncols=80)
    for step, batch in enumerate(progress):
        prompts = [render(policy, messages, hint) for messages, hint, _ in batch]
        replies = [tokenizer.encode(reply, add_special_tokens=False) + policy.stop_ids for _, _, reply in batch]
        if BASE["full"] == 2 or BASE["full"] and step < BASE["steps"] * BASE["pretraining"]:
            prompts, replies = [p[:1] for p in prompts], [p[1:] + r for p, r in zip(prompts, replies)]
        logits = score(model, prompts, replies)  # (N, V)
        loss = F.cross_entropy(logits, torch.tensor(sum(replies, []), device=device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        progress.set_postfix(loss=f"{loss.item():.3f}")
    return policy


def embedded_base(cfg: Config, device: str) -> Policy:
    """The embedded base: trained at first, then read from its folder while its settings are the same."""
    folder = Path(cfg.base or Path(cfg.out, "base"))
    batches = base_demonstrations()
    made_with = json.dumps({**BASE, "demonstrations": hashlib.sha256(repr(batches).encode()).hexdigest()[:16]})
    stamp = folder / "made_with.json"  # written last: a half-written base has none
    if stamp.exists() and stamp.read_text() == made_with:
        print(f"base model: reusing {folder}")
        return load_policy(str(folder), cfg, device)
    print("base model: " + ("the kept one was made with other settings, training it again" if stamp.exists()
                            else "training it once, later runs reuse it") + f" ({folder})")
    policy = train_base(batches, cfg, device)
    save(policy, folder)
    stamp.write_text(made_with)
    return policy


def save(policy: Policy, folder: Path):
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)


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
    shown: dict[str, bool]  # the behaviours that apply to this turn, and whether it shows them
    hint: str | None = None  # the judge's, on a failed turn
    hinted_prompt: list[int] = field(default_factory=list)  # what the teacher sees before ids
    advantage: float = 0.0  # of the episode that the turn belongs to


@dataclass
class Episode:
    env: envs.Repair
    group: int  # index of the task within the step: episodes of one group share a baseline
    messages: list[dict]
    turns: list[Turn] = field(default_factory=list)

    def rate(self, name: str) -> float:
        """Share of this episode's turns that show the behaviour, of those it applies to."""
        rates = [t.shown[name] for t in self.turns if name in t.shown]
        return sum(rates) / max(len(rates), 1)

    def reward(self, bonus: float) -> float:
        return self.env.success + bonus * sum(self.rate(b.name) for b in envs.BEHAVIOURS)


def with_hint(messages: list[dict], hint: str | None) -> list[dict]:
    """The hint goes into the last message: a message of its own would break strict chat templates."""
    if not hint:
        return messages
    return [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}\n{hint}"}]


def render(policy: Policy, messages: list[dict], hint: str | None = None) -> list[int]:
    """The ids of the conversation up to the policy's next reply, as its own chat template writes it."""
    return policy.tokenizer.apply_chat_template(with_hint(messages, hint), add_generation_prompt=True,
                                                tokenize=True, return_dict=False)


@contextmanager
def eval_mode(model):
    """No dropout while sampling or scoring: the ratio of a token must be 1 before the first update."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@torch.no_grad()
def sample(policy: Policy, prompts: list[list[int]], generator: torch.Generator) -> list[tuple]:
    """(ids, logprobs, entropies) per prompt: ids ~ softmax(logits / temperature), until a stop token.

    Rows are padded on the left, so that all of them continue at the same column. Rows that have
    stopped leave the batch as soon as they are half of it."""
    model, device, width = policy.model, policy.model.device, max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)  # (B, T)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)  # (B, T)
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # (B, T)
    cache, rows, replies = DynamicCache(config=model.config), list(range(len(prompts))), [([], [], []) for _ in prompts]
    stop_ids = set(policy.stop_ids)
    with eval_mode(model):
        for _ in range(policy.max_tokens):
            logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache,
                           logits_to_keep=1).logits[:, -1]
            logp = F.log_softmax(logits.float() / policy.temperature, dim=-1)  # (B, V)
            ids = torch.multinomial(logp.exp(), 1, generator=generator)  # (B, 1)
            entropy = -(logp.exp() * logp).sum(-1)
            live = []
            for i, values in enumerate(zip(ids[:, 0].tolist(), logp.gather(1, ids)[:, 0].tolist(), entropy.tolist())):
                reply = replies[rows[i]]
                if not stop_ids.intersection(reply[0][-1:]):
                    for column, value in zip(reply, values):
                        column.append(value)
                    if values[0] not in stop_ids:
                        live.append(i)
            if not live:
                break
            mask = F.pad(mask, (0, 1), value=1)
            positions = positions[:, -1:] + 1
            if len(live) <= len(rows) // 2:
                keep = torch.tensor(live, device=device)
                cache.batch_select_indices(keep)
                ids, mask, positions, rows = ids[keep], mask[keep], positions[keep], [rows[i] for i in live]
    return replies


def rollout(policy: Policy, tasks: list[envs.Task], group: int, generator: torch.Generator,
            hinted: bool = False) -> list[Episode]:
    """`group` episodes of each task, all live ones in lock-step.

    With `hinted` the policy sees every hint that could apply: it measures whether hints are followed."""
    episodes = []
    for i, task in enumerate(tasks * group):
        env = envs.Repair(task)
        episodes.append(Episode(env, i % len(tasks), [{"role": "user", "content": env.first_message()}]))
    live = episodes
    while live:
        prompts = [render(policy, e.messages, envs.hints(e.env.task, e.env.kind) if hinted else None) for e in live]
        fits = [len(p) + policy.max_tokens <= policy.max_context for p in prompts]
        live, prompts = ([x for x, ok in zip(xs, fits) if ok] for xs in (live, prompts))
        if not live:
            break
        replies = sample(policy, prompts, generator)
        still_live = []
        for episode, prompt, (ids, logprobs, entropies) in zip(live, prompts, replies):
            env, messages = episode.env, episode.messages
            text = policy.tokenizer.decode(ids, skip_special_tokens=True)
            episode.turns.append(Turn(env.task, env.kind, messages, prompt, ids, logprobs, entropies,
                                      truncated=ids[-1] not in policy.stop_ids, text=text,
                                      shown=envs.shown(env.task, env.kind, text)))
            observation = env.step(text)
            episode.messages = messages + [{"role": "assistant", "content": text}]
            if observation is not None:
                episode.messages.append({"role": "user", "content": observation})
                still_live.append(episode)
        live = still_live
    return episodes


# ---------------------------------------------------------------------------- judge and teacher
def rule_judge(turns: list[Turn]) -> list[str | None]:
    """A hint for every turn that failed a behaviour, None for every other."""
    return [envs.hints(turn.task, turn.kind, turn.text) for turn in turns]


def attach_hints(policy: Policy, turns: list[Turn], judge):
    """The teacher's view of each failed turn. A hint that the model's context cannot hold is dropped:
    the teacher must never read a conversation that was cut."""
    for turn, hint in zip(turns, judge(turns)):
        hinted_prompt = render(policy, turn.messages, hint)
        if hint and len(hinted_prompt) + len(turn.ids) <= policy.max_context:
            turn.hint, turn.hinted_prompt = hint, hinted_prompt


# --------------------------------------------------------------------------------------- losses
def group_advantages(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """A_i = (r_i - mean_g) / std_g over the episodes of i's group g; 0 where all rewards are equal.

    rewards (E,), groups (E,) -> (E,). The std is the population's. GRPO, arXiv 2402.03300, section 4.1."""
    advantages = torch.zeros_like(rewards)
    for g in groups.unique():
        r = rewards[groups == g]
        if r.max() > r.min():
            advantages[groups == g] = (r - r.mean()) / r.std(correction=0)
    return advantages


def grpo_loss(logprobs, old_logprobs, advantages, clip: float) -> torch.Tensor:
    """-sum_j min(rho_j A_j, clip(rho_j, 1 - e, 1 + e) A_j),  rho_j = exp(logprob_j - old_logprob_j)

    All arguments (N,), one entry per sampled token -> scalar. PPO's clipped surrogate with GRPO's
    advantages, without a KL term. At rho = 1 its value says nothing, its gradient is -A_j per token."""
    ratio = (logprobs - old_logprobs).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages).sum()


def distill_loss(student_logprobs, teacher_logprobs) -> torch.Tensor:
    """sum_j KL(teacher_j || student_j) = sum_j sum_v q_j(v) (log q_j(v) - log p_j(v)),  q without gradient

    student_logprobs log p and teacher_logprobs log q, both (N, V), one row per sampled token of a failed
    turn -> scalar. In this direction the gradient on a logit is p - q: it does not vanish for a token
    that the student never proposes, as it does with KL(student || teacher)."""
    return F.kl_div(student_logprobs, teacher_logprobs.detach(), log_target=True, reduction="sum")


# --------------------------------------------------------------------------------------- update
def score(model, prompts: list[list[int]], replies: list[list[int]]) -> torch.Tensor:
    """(N, V) logits in float32 that predict the N reply tokens, row after row, in their order.

    Rows are padded on the right, where causal attention never looks: no mask is needed. The token at
    column j is predicted at column j - 1. Only those positions reach the output matrix."""
    width = max(len(p) + len(r) for p, r in zip(prompts, replies))
    ids = torch.tensor([p + r + [0] * (width - len(p) - len(r)) for p, r in zip(prompts, replies)],
                       device=model.device)  # (B, T)
    rows = [b for b, r in enumerate(replies) for _ in r]
    columns = [len(p) + j - 1 for p, r in zip(prompts, replies) for j in range(len(r))]
    with eval_mode(model):
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state  # (B, T, H)
        return model.get_output_embeddings()(hidden[rows, columns]).float()


def micro_batches(turns: list[Turn], batch_tokens: int):
    """Turns of similar length together, as many as fit into the token budget with their padding."""
    batch, width = [], 0
    for turn in sorted(turns, key=lambda t: len(t.prompt) + len(t.ids)):
        width = max(len(turn.prompt), len(turn.hinted_prompt)) + len(turn.ids)
        if batch and width * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(turn)
    if batch:
        yield batch


def update(policy: Policy, teacher, optimizer, turns: list[Turn], cfg: Config) -> dict:
    """One AdamW step on L = (L_grpo + coef * L_distill) / N, N = all sampled tokens of the step.

    Turns without advantage and without hint have no gradient and are not scored."""
    total = sum(len(t.ids) for t in turns)  # N, before the micro-batches
    sums = dict(grpo_loss=0.0, distill_loss=0.0, max_logprob_gap=0.0, grad_norm=0.0, update_tokens=0)
    optimizer.zero_grad()
    for batch in micro_batches([t for t in turns if t.advantage or t.hint], cfg.batch_tokens):
        flat = lambda name: torch.tensor([x for t in batch for x in getattr(t, name)], device=policy.model.device)
        ids, old_logprobs = flat("ids"), flat("logprobs")  # (N,)
        per_token = [(t.advantage, t.hint is not None) for t in batch for _ in t.ids]
        advantages, failed = (torch.tensor(x, device=ids.device) for x in zip(*per_token))  # (N,)
        logits = score(policy.model, [t.prompt for t in batch], [t.ids for t in batch])
        student = F.log_softmax(logits / cfg.temperature, dim=-1)  # (N, V)
        logprobs = student.gather(1, ids[:, None])[:, 0]  # (N,)
        rl = grpo_loss(logprobs, old_logprobs, advantages, cfg.clip) / total
        distill = torch.zeros_like(rl)
        if failed.any():
            hinted = [t for t in batch if t.hint]
            with torch.no_grad():
                logits = score(teacher, [t.hinted_prompt for t in hinted], [t.ids for t in hinted])
            distill = distill_loss(student[failed], F.log_softmax(logits / cfg.temperature, dim=-1)) / total
        (rl + cfg.coef * distill).backward()
        sums["grpo_loss"] += rl.item()
        sums["distill_loss"] += distill.item()
        gap = (logprobs.detach() - old_logprobs).abs().max().item()
        sums["max_logprob_gap"] = max(sums["max_logprob_gap"], gap)
        sums["update_tokens"] += sum(len(t.prompt) + len(t.ids) for t in batch)
    if sums["update_tokens"]:  # AdamW would move the weights even without a gradient
        sums["grad_norm"] = torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0).item()
        optimizer.step()
    return sums


def train_step(policy: Policy, teacher, optimizer, rng: random.Random, generator, cfg: Config) -> dict:
    """One pass of steps 1 to 6 of the algorithm; returns the step's metrics."""
    start = time.perf_counter()
    tasks = [envs.make_task(rng.randrange(envs.HELD_OUT)) for _ in range(cfg.tasks)]
    episodes = rollout(policy, tasks, cfg.group, generator)
    turns = [turn for episode in episodes for turn in episode.turns]
    if cfg.method != "grpo":
        attach_hints(policy, turns, rule_judge)
    rewards = torch.tensor([e.reward(cfg.bonus) for e in episodes], dtype=torch.float64)
    advantages = group_advantages(rewards, torch.tensor([e.group for e in episodes]))
    if cfg.method != "distill":
        for episode, advantage in zip(episodes, advantages.tolist()):
            for turn in episode.turns:  # every turn of an episode carries the episode's advantage
                turn.advantage = advantage
    middle = time.perf_counter()
    stats = update(policy, teacher, optimizer, turns, cfg)
    flat = sum(not advantages[i::cfg.tasks].any() for i in range(cfg.tasks))
    return {**figures(episodes, cfg), **stats, "turns_hinted": mean(t.hint is not None for t in turns),
            "tokens_distilled": mean(t.hint is not None for t in turns for _ in t.ids),
            "flat_groups": flat / cfg.tasks, "rollout_s": middle - start,
            "update_s": time.perf_counter() - middle,
            "rollout_tokens": sum(len(t.prompt) + len(t.ids) for t in turns)}


# ------------------------------------------------------------------------------------ seeing it
def mean(values) -> float | None:
    """None for no values: the entropy of failed turns when none failed."""
    values = list(values)
    return sum(values) / len(values) if values else None


def figures(episodes: list[Episode], cfg: Config) -> dict:
    """Means over episodes, turns or sampled tokens. A failed turn lacks a behaviour that applies to it."""
    turns = [turn for episode in episodes for turn in episode.turns]
    return {"reward": mean(e.reward(cfg.bonus) for e in episodes),
            "success": mean(e.env.success for e in episodes),
            **{b.name: mean(t.shown[b.name] for t in turns if b.name in t.shown) for b in envs.BEHAVIOURS},
            "entropy": mean(h for t in turns for h in t.entropies),
            "entropy_failed": mean(h for t in turns if not all(t.shown.values()) for h in t.entropies),
            "entropy_passed": mean(h for t in turns if all(t.shown.values()) for h in t.entropies),
            "reply_tokens": mean(len(t.ids) for t in turns),
            "truncated": mean(t.truncated for t in turns)}


def evaluate(policy: Policy, cfg: Config, hinted: bool = False) -> tuple[dict, list[Episode]]:
    """Held-out tasks with the same draws of the sampler at every call, by default without hints."""
    tasks = [envs.make_task(envs.HELD_OUT + i) for i in range(cfg.eval_episodes)]
    generator = torch.Generator(policy.model.device).manual_seed(0)
    episodes = rollout(policy, tasks, 1, generator, hinted)
    return {**figures(episodes, cfg), "episodes": len(episodes)}, episodes


def show(title: str, episode: Episode):
    """The episode as a conversation, with the judge's hint under each turn that failed."""
    print(f"\n{f' {title} ':-^80}")
    for turn in episode.turns:
        hint = rule_judge([turn])[0]
        for who, text in (("user", turn.messages[-1]["content"]), ("policy", turn.text),
                          *([("hint", f"{hint} (for the teacher only)")] if hint else [])):
            print(f"{who:>7}  " + text.replace("\n", "\n" + " " * 9))
    print(f"{'success' if episode.env.success else 'no success':>{9 + 10}}")


def table(rows: dict[str, dict]):
    names = ["success", *(b.name for b in envs.BEHAVIOURS), "entropy", "reply_tokens"]
    print(f"\n{'held-out tasks, no hints':<26}" + "".join(f"{n:>13}" for n in names))
    for title, row in rows.items():
        print(f"{title:<26}" + "".join(f"{row[n]:>13.3f}" for n in names))


COLUMNS = ("reward", "success", *(b.name for b in envs.BEHAVIOURS), "turns_hinted", "distill_loss", "entropy",
           "reply_tokens")


def train(policy: Policy, cfg: Config, metrics_file) -> tuple[dict, bool]:
    """All steps; returns the seconds spent and whether Ctrl-C ended them early."""
    teacher = copy.deepcopy(policy.model) if cfg.teacher == "frozen" else policy.model
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=cfg.lr, weight_decay=0.0)
    rng, generator = random.Random(cfg.seed), torch.Generator(policy.model.device).manual_seed(cfg.seed)
    seconds = dict(rollout=0.0, update=0.0)
    print(f"\n{'step':>4}" + "".join(f"{c[:9]:>10}" for c in COLUMNS))
    progress = tqdm(range(1, cfg.steps + 1), cfg.method, disable=None, ncols=80)
    try:
        for step in progress:
            for group in optimizer.param_groups:
                group["lr"] = cfg.lr * min(1.0, step / max(cfg.warmup, 1))
            metrics = {"step": step, **train_step(policy, teacher, optimizer, rng, generator, cfg)}
            print(json.dumps(metrics), file=metrics_file, flush=True)
            for phase in seconds:
                seconds[phase] += metrics[f"{phase}_s"]
            progress.set_postfix_str(" ".join(f"{n} {metrics[n]:.2f}" for n in COLUMNS[1:4]))
            if step % 10 == 0 or step in (1, cfg.steps):
                tqdm.write(f"{step:>4}" + "".join(f"{metrics[c]:>10.3f}" for c in COLUMNS))
            if not metrics["update_tokens"]:
                tqdm.write(f"{step:>4}  no failed turn and no group with different rewards: nothing to learn, "
                           "update skipped")
    except KeyboardInterrupt:
        return seconds, True
    finally:
        progress.close()
    return seconds, False


def main(argv: list[str] | None = None):
    cfg = parse_args(argv)
    out = Path(cfg.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        metrics_file = (out / "metrics.jsonl").open("w")
    except OSError as error:
        raise SystemExit(f"--out {cfg.out}: cannot write there ({error.strerror})")
    device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    clock = time.perf_counter()
    policy = load_policy(cfg.model, cfg, device) if cfg.model else embedded_base(cfg, device)
    seconds = {"base": time.perf_counter() - clock}

    clock = time.perf_counter()
    before, episodes = evaluate(policy, cfg)
    hinted, _ = evaluate(policy, cfg, hinted=True)
    names = [b.name for b in envs.BEHAVIOURS]
    base = {"success": before["success"], "unhinted": {n: before[n] for n in names},
            "hinted": {n: hinted[n] for n in names}}
    seconds["evaluate"] = time.perf_counter() - clock
    table({"before": before})

    trained, interrupted = train(policy, cfg, metrics_file)
    save(policy, out / "policy")
    after = None
    if not interrupted:
        clock = time.perf_counter()
        after, episodes_after = evaluate(policy, cfg)
        seconds["evaluate"] += time.perf_counter() - clock
        show("before", episodes[0])
        show("after", episodes_after[0])
        table({"before": before, "after": after})
    summary = dict(config=asdict(cfg), base=base, before=before, after=after, seconds={**seconds, **trained})
    (out / "summary.json").write_text(json.dumps(summary, indent=1))
    print(f"\nwritten to {out}: metrics.jsonl, summary.json, policy/")
    if interrupted:
        sys.exit(130)


if __name__ == "__main__":
    main()
