"""Train the demo hybrid on one GPU, in pieces of a stated length.

    python -m tools.train_demo_hybrid.train --corpus DIR --work DIR --out DIR --seconds 520 --schedule-seconds 1040

``--work`` keeps tokens and the full state (weights and optimizer) between pieces on the same machine; ``--out`` gets
what leaves it: ``weights-N.bf16`` files below 16 MiB, ``tokenizer.json``, ``log.jsonl``. ``--resume-weights DIR``
starts from such files, with a short warm-up of the optimizer.
Order: three stages by context length; the learning rate is constant and falls to zero over the last part.
Source: Jordan et al. 2024 (Muon); Loshchilov and Hutter 2019 (AdamW); Hägele et al. 2024 (constant rate with cooldown).
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import os
import random
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch._dynamo
import torch.nn.functional as F
import torch.utils.checkpoint
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor, nn

from tools.train_demo_hybrid.model import Config, Model, rope_table
from tools.train_demo_hybrid.parts import read_tensors
from tools.train_demo_hybrid.tokens import N_VOCAB, encode_documents, encode_tasks, train_tokenizer

TOKENS_PER_STEP = 1 << 18
STAGES = ((1024, 0.45), (4096, 0.25), (16384, 0.30))
"""Context length and share of the time."""
TASK_SHARE = (0.4, 0.5, 0.6)
TASK_ROWS = (12288, 4096, 1536)
COOLDOWN, WARMUP_STEPS = 0.35, 40
MUON_RATE, ADAM_RATE = 0.02, 3e-3
MTP_WEIGHT, CHAIN_WEIGHT = 0.25, 0.1
PART_BYTES = 15 << 20


class Muon(torch.optim.Optimizer):
    """Momentum whose matrix updates are brought near orthogonal by five Newton-Schulz steps."""

    def __init__(self, params: list[nn.Parameter], rate: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": rate, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                velocity = state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                update = orthogonal(p.grad.lerp(velocity, group["momentum"]))
                p.mul_(1 - group["lr"] * 0.05)
                p.add_(update.to(p.dtype), alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    x = matrix.bfloat16()
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if is_tall else x


def optimizers(model: Model) -> list[torch.optim.Optimizer]:
    matrices, others = [], []
    for name, p in model.named_parameters():
        is_matrix = p.ndim == 2 and "embd" not in name and "conv" not in name and min(p.shape) > 16
        (matrices if is_matrix else others).append(p)
    return [Muon(matrices, MUON_RATE), torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0)]


# ---- data ----


def read_documents(path: Path) -> list[str]:
    return lzma.decompress(path.read_bytes()).decode().split("\x00")


class Data:
    """Token streams and task rows, made once for each work folder."""

    def __init__(self, corpus: Path, work: Path, scale: float, processes: int) -> None:
        self.tokenizer_path = work / "tokenizer.json"
        cache = work / "tokens.npz"
        if not cache.exists():
            self._make(corpus, cache, scale, processes)
        arrays = np.load(cache)
        self.train, self.held_out = arrays["train"], arrays["held_out"]
        self.held_out_bytes = int(arrays["held_out_bytes"])
        self.tasks = [(arrays[f"tasks{i}"], arrays[f"marks{i}"]) for i in range(len(STAGES))]
        self.exams = [(arrays[f"exam{i}"], arrays[f"exam_marks{i}"]) for i in range(len(STAGES))]

    def _make(self, corpus: Path, cache: Path, scale: float, processes: int) -> None:
        documents = read_documents(corpus / "train.txt.xz")
        held_out = read_documents(corpus / "held_out.txt.xz")
        sample = random.Random(1).sample(documents, max(1, len(documents) // 3))
        known = corpus / "tokenizer.json"
        if known.exists():
            self.tokenizer_path.write_bytes(known.read_bytes())
            tokenizer = Tokenizer.from_file(str(self.tokenizer_path))
        else:
            tokenizer = train_tokenizer(sample, self.tokenizer_path)
        arrays: dict[str, NDArray[np.generic]] = {
            "train": encode_documents(tokenizer, documents[: max(1, int(len(documents) * min(1.0, scale)))]),
            "held_out": encode_documents(tokenizer, held_out),
            "held_out_bytes": np.array(sum(len(text.encode()) for text in held_out)),
        }
        filler, exam_filler = "\n\n".join(documents[:3000]), "\n\n".join(held_out)
        for i, (width, _) in enumerate(STAGES):
            n_rows = max(16, int(TASK_ROWS[i] * scale))
            path = self.tokenizer_path
            arrays[f"tasks{i}"], arrays[f"marks{i}"] = encode_tasks(path, filler, width, n_rows, i, processes)
            arrays[f"exam{i}"], arrays[f"exam_marks{i}"] = encode_tasks(
                path, exam_filler, width, 32, 100 + i, processes
            )
        np.savez(cache, **arrays)

    def batch(self, stage: int, rng: np.random.Generator, n_rows: int) -> tuple[Tensor, Tensor]:
        """Tokens ``[n_rows, width]`` and loss weights for the prediction of each of them."""
        width = STAGES[stage][0]
        n_tasks = round(n_rows * TASK_SHARE[stage])
        begins = rng.integers(0, len(self.train) - width, n_rows - n_tasks)
        text = np.stack([self.train[begin : begin + width] for begin in begins])
        rows, marks = self.tasks[stage]
        chosen = rng.integers(0, len(rows), n_tasks)
        tokens = np.concatenate((text, rows[chosen]))
        weights = np.concatenate((np.ones(text.shape, dtype=np.uint8), marks[chosen]))
        return _to_gpu(tokens), _to_gpu(weights)


def _to_gpu(array: NDArray[np.generic]) -> Tensor:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.from_numpy(array.astype(np.int64)).to(device, non_blocking=True)


# ---- loss ----


def weighted_loss(model: Model, hidden: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Cross entropy of ``hidden`` rows ``[B, T, D]`` against ``targets``, a piece at a time to bound memory."""
    total = hidden.new_zeros((), dtype=torch.float32)
    rows, wanted, marks = hidden.flatten(0, 1), targets.flatten(), weights.flatten().float()
    for part, want, mark in zip(rows.split(65536), wanted.split(65536), marks.split(65536), strict=True):
        loss = torch.utils.checkpoint.checkpoint(_piece_loss, model, part, want, mark, use_reentrant=False)
        total = total + loss
    return total / marks.sum()


def _piece_loss(model: Model, part: Tensor, want: Tensor, mark: Tensor) -> Tensor:
    return (F.cross_entropy(model.logits(part).float(), want, reduction="none") * mark).sum()


def losses(model: Model, tokens: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Losses of the trunk, of the MTP block, and of the block chained on its own output."""
    table = rope_table(model.c, tokens.shape[1], tokens.device)
    hidden = model.trunk(tokens, table)
    trunk = weighted_loss(model, hidden[:, :-1], tokens[:, 1:], weights[:, 1:])
    # Every other row is enough for the block, which shares the trunk's work.
    hidden, tokens, weights = hidden[::2], tokens[::2], weights[::2]
    embedded = model.token_embd(tokens)
    first = model.mtp(embedded, model.shifted(hidden), table)
    second = model.mtp(embedded, model.shifted(first), table)
    mtp = weighted_loss(model, first[:, :-1], tokens[:, 1:], weights[:, 1:])
    chain = weighted_loss(model, second[:, :-1], tokens[:, 1:], weights[:, 1:])
    return trunk, mtp, chain


# ---- what is measured ----


@torch.no_grad()
def evaluate(model: Model, data: Data) -> dict[str, float]:
    """Held-out bits per byte, agreement of drafts with the trunk, and answers recalled, by context length."""
    model.eval()
    found: dict[str, float] = {}
    n_rows = max(1, min(64, len(data.held_out) // 4096 - 1))
    tokens = _to_gpu(np.stack([data.held_out[i * 4096 : (i + 1) * 4096] for i in range(n_rows)]))
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
        bits = agree = chained = n = n_agreed = 0.0
        for row in tokens.split(4):
            hidden, first = model(row)
            logits = model.logits(hidden).float()
            bits += F.cross_entropy(
                logits[:, :-1].flatten(0, 1), row[:, 1:].flatten(), reduction="sum"
            ).item() / math.log(2)
            choice = logits.argmax(-1)
            draft = model.logits(first).argmax(-1)
            agree += (draft == choice).float().sum().item()
            second = model.mtp(model.token_embd(row), model.shifted(first), _table(model, row))
            is_first_right = F.pad(draft == choice, (1, 0))[:, :-1]
            chained += ((model.logits(second).argmax(-1) == choice) & is_first_right).float().sum().item()
            n_agreed += is_first_right.float().sum().item()
            n += row.numel()
        bytes_per_token = data.held_out_bytes / len(data.held_out)
        found["bits_per_byte"] = bits / n / bytes_per_token
        found["first_draft"] = agree / n
        found["second_draft"] = chained / max(1.0, n_agreed)
        for i, (width, _) in enumerate(STAGES):
            found[f"recall_{width}"] = _recall(model, *data.exams[i])
    model.train()
    return found


def _table(model: Model, row: Tensor) -> tuple[Tensor, Tensor]:
    return rope_table(model.c, row.shape[1], row.device)


def _recall(model: Model, rows: NDArray[np.uint16], marks: NDArray[np.uint8]) -> float:
    """Share of answers of which every token is the first choice."""
    right = total = 0
    for begin in range(0, len(rows), 2):
        tokens = _to_gpu(rows[begin : begin + 2])
        choice = model.logits(model.trunk(tokens, _table(model, tokens))).argmax(-1)
        is_right = (choice[:, :-1] == tokens[:, 1:]).cpu().numpy()
        for row, mark in zip(is_right, marks[begin : begin + 2, 1:], strict=True):
            edges = np.flatnonzero(np.diff(np.concatenate(([0], mark > 1, [0])).astype(np.int8)))
            for first, last in edges.reshape(-1, 2):
                if last - first < 24:
                    right += bool(row[first:last].all())
                    total += 1
    return right / max(1, total)


# ---- pieces ----


def write_weights(model: Model, out: Path, config: Config) -> None:
    """bf16 in files that a small channel can carry, and the configuration."""
    bits = {name: p.detach().float().cpu() for name, p in model.state_dict().items()}
    raw = b"".join(t.to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes() for t in bits.values())
    for i, begin in enumerate(range(0, len(raw), PART_BYTES)):
        (out / f"weights-{i}.bf16").write_bytes(raw[begin : begin + PART_BYTES])
    shapes = {name: list(t.shape) for name, t in bits.items()}
    (out / "model.json").write_text(json.dumps({"config": asdict(config), "tensors": shapes}, indent=1) + "\n")


def read_weights(folder: Path) -> tuple[Config, dict[str, Tensor]]:
    """What ``write_weights`` wrote, as float32."""
    config, tensors = read_tensors(folder)
    config["rope_sections"] = tuple(config["rope_sections"])
    return Config(**config), {name: torch.from_numpy(values.copy()) for name, values in tensors.items()}


def stage_of(progress: float) -> int:
    end = 0.0
    for i, (_, share) in enumerate(STAGES):
        end += share
        if progress < end:
            return i
    return len(STAGES) - 1


def rate_of(progress: float, steps: int) -> float:
    cooldown = min(1.0, (1.0 - progress) / COOLDOWN)
    return max(0.02, cooldown) * min(1.0, (steps + 1) / WARMUP_STEPS)


def steps_until(deadline: float, most: int) -> Iterator[int]:
    step = 0
    while time.monotonic() < deadline and step < most:
        yield step
        step += 1


def run(options: argparse.Namespace) -> None:
    started = time.monotonic()
    options.work.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.suppress_errors = True
    torch._dynamo.config.recompile_limit = 64
    data = Data(options.corpus, options.work, options.scale, options.processes)
    (options.out / "tokenizer.json").write_bytes(data.tokenizer_path.read_bytes())
    print(f"data after {time.monotonic() - started:.0f} s: {len(data.train)} tokens", flush=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = Config(n_vocab=N_VOCAB)
    model = Model(config).to(device)
    if options.resume_weights is not None:
        config, tensors = read_weights(options.resume_weights)
        model.load_state_dict(tensors)
    tools = optimizers(model)
    base = [[group["lr"] for group in tool.param_groups] for tool in tools]
    spent, n_steps = 0.0, 0
    state_path = options.work / "state.pt"
    if state_path.exists():
        saved = torch.load(state_path, weights_only=False)
        model.load_state_dict(saved["model"])
        for tool, state in zip(tools, saved["tools"], strict=True):
            tool.load_state_dict(state)
        spent, n_steps = saved["spent"], saved["n_steps"]
    n_parameters = sum(p.numel() for p in model.parameters())
    print(f"{n_parameters} parameters on {device}; {spent:.0f} s trained before", flush=True)
    rng = np.random.default_rng(options.seed + n_steps)
    log = (options.out / "log.jsonl").open("a")
    begun = time.monotonic()
    deadline = started + options.seconds - options.reserve
    tokens_seen = 0
    for step in steps_until(deadline, options.steps):
        progress = min(1.0, (spent + time.monotonic() - begun) / options.schedule_seconds)
        stage = stage_of(progress)
        width = STAGES[stage][0]
        factor = rate_of(progress, n_steps if options.resume_weights is None else step)
        for tool, rates in zip(tools, base, strict=True):
            for group, rate in zip(tool.param_groups, rates, strict=True):
                group["lr"] = rate * factor
        tokens, weights = data.batch(stage, rng, max(1, int(TOKENS_PER_STEP * options.batch_scale) // width))
        parts: list[list[float]] = []
        n_micro = max(1, tokens.numel() // options.micro_tokens)
        for rows, marks in zip(tokens.chunk(n_micro), weights.chunk(n_micro), strict=True):
            with torch.autocast(device, dtype=torch.bfloat16):
                trunk, mtp, chain = losses(model, rows, marks)
            ((trunk + MTP_WEIGHT * mtp + CHAIN_WEIGHT * chain) / n_micro).backward()
            parts.append([trunk.detach(), mtp.detach(), chain.detach()])  # type: ignore[list-item]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for tool in tools:
            tool.step()
            tool.zero_grad(set_to_none=True)
        n_steps += 1
        tokens_seen += tokens.numel()
        if step % options.log_every == 0:
            means = [float(sum(part[i] for part in parts)) / len(parts) for i in range(3)]
            line = {
                "step": n_steps,
                "seconds": round(spent + time.monotonic() - begun, 1),
                "width": width,
                "rate": round(factor, 4),
                "loss": round(means[0], 4),
                "mtp": round(means[1], 4),
                "chain": round(means[2], 4),
            }
            log.write(json.dumps(line) + "\n")
            log.flush()
            if step % (options.log_every * 10) == 0:
                print(line, flush=True)
    took = time.monotonic() - begun
    spent += took
    print(f"{tokens_seen / took:.0f} tokens/s over {took:.0f} s", flush=True)
    torch.save({"model": model.state_dict(), "tools": [tool.state_dict() for tool in tools], "spent": spent,
                "n_steps": n_steps}, state_path)  # fmt: skip
    write_weights(model, options.out, config)
    found = evaluate(model, data)
    log.write(
        json.dumps({"seconds": round(spent, 1), "tokens": tokens_seen, **{k: round(v, 4) for k, v in found.items()}})
        + "\n"
    )
    print({k: round(v, 4) for k, v in found.items()}, flush=True)
    if device == "cuda":
        print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=520, help="of this piece, data included")
    parser.add_argument("--reserve", type=float, default=40, help="of these, for the evaluation at the end")
    parser.add_argument("--schedule-seconds", type=float, default=1000, help="training time of all pieces")
    parser.add_argument("--steps", type=int, default=1 << 30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the data to prepare")
    parser.add_argument("--batch-scale", type=float, default=1.0)
    parser.add_argument("--micro-tokens", type=int, default=1 << 17)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--log-every", type=int, default=5)
    parser.add_argument("--resume-weights", type=Path, default=None)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
