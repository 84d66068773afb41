"""Speed of corpus generation and of training, as ratios over plain eager loops in the same run.

    python tests/bench/train_speed.py [--num-prompts 128] [--max-tokens 96] [--num-steps 4] [--output FILE]

Generation: the scheduler (prefill one request at a time, noise for every token of the vocabulary)
against the batched generator, both asked the same prompts at T = 0.8 and 0, answer tokens a second.
Training: one update of an 8,192-token head on the same samples, S steps unrolled; the plain loop
materialises the mask over all steps, runs in fp32 and keeps every step's logits for autograd.
Blocks alternate plain, ours, ours, plain; process time stands beside wall time, so that a machine
shared with others shows itself.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from spectune.engine.resolve import resolve_model
from spectune.engine.scheduler import Engine
from spectune.engine.target import Target
from spectune.engine.tokenizer import Tokenizer
from spectune.records import Request, Sampling
from spectune.train.corpus import chat_frame
from spectune.train.generate import Generator, Job
from spectune.train.head import Eagle3Head, head_config, init_from_target
from spectune.train.optimizer import HeadOptimizer
from spectune.train.plan import TrainPlan
from spectune.train.prompts import template_prompt
from spectune.train.ttt import Sample, collate, loss_mask, target_table, ttt_loss
from spectune.train.vocab import build_vocab


def plain_loss(
    head: Eagle3Head, embedding: Tensor, samples: list[Sample], rows: Tensor, steps: int
) -> Tensor:
    """The unrolled objective written down directly, one sample at a time, mask over all T·(i+1) keys."""
    total = torch.zeros(())
    for sample in samples:
        batch = collate([sample], steps)
        table = target_table(batch, rows, head.t2d, steps)
        length, start = sample.ids.numel(), int(batch.starts[0])
        width = batch.positions.shape[1]
        state = head.fc(sample.features.float())[None]  # [1, T, H]
        keys: list[Tensor] = []
        values: list[Tensor] = []
        masks: list[Tensor] = []
        for step in range(steps):
            reads = (torch.arange(length) + 1 + step).clamp(max=length - 1)
            positions = (torch.arange(length) + step)[None]
            pair = head.pair(state, embedding[sample.ids[reads]][None])
            key, value = head.keys_values(pair, positions)
            keys.append(key)
            values.append(value)
            square = torch.ones(length, length, dtype=torch.bool)
            masks.append(square.tril() if step == 0 else torch.eye(length, dtype=torch.bool))
            attended = torch.nn.functional.scaled_dot_product_attention(
                head.queries(pair, positions),
                torch.cat(keys, 2),
                torch.cat(values, 2),
                attn_mask=torch.cat(masks, 1),
                enable_gqa=True,
            )
            state = head.finish(state, attended)
            inside = loss_mask(batch, step)
            chosen = inside & table.known[:, step : step + width]
            logits = head.lm_head(head.norm(state[:, start : start + width][chosen]))
            wanted = table.probs[table.row[:, step : step + width][chosen]]
            entropy = -(wanted * logits.log_softmax(-1)).sum()
            total = total + 0.8**step * entropy / max(1, int(inside.sum()))
    return total / len(samples)


def clocked(work: Callable[[], int]) -> dict[str, float]:
    """Tokens a second of wall and of process time."""
    wall, cpu = time.perf_counter(), time.process_time()
    tokens = work()
    return {
        "tokens": tokens,
        "per_s": tokens / (time.perf_counter() - wall),
        "per_cpu_s": tokens / (time.process_time() - cpu),
    }


def alternate(plain: Callable[[], int], ours: Callable[[], int]) -> dict[str, object]:
    """A B B A, each warmed once before."""
    blocks = {"plain": [], "ours": []}  # type: dict[str, list[dict[str, float]]]
    plain()
    ours()
    for name, work in (("plain", plain), ("ours", ours), ("ours", ours), ("plain", plain)):
        blocks[name].append(clocked(work))

    def pooled(name: str, key: str) -> float:
        seconds = sum(block["tokens"] / block[key] for block in blocks[name])
        return sum(block["tokens"] for block in blocks[name]) / seconds

    result: dict[str, object] = {
        f"{name}_{key}": round(pooled(name, key), 1) for name in blocks for key in ("per_s", "per_cpu_s")
    }
    result["ratio"] = round(pooled("ours", "per_s") / pooled("plain", "per_s"), 2)
    result["ratio_cpu"] = round(pooled("ours", "per_cpu_s") / pooled("plain", "per_cpu_s"), 2)
    return result


def generation(folder: Path, num_prompts: int, max_tokens: int) -> dict[str, object]:
    """Answer tokens a second of the scheduler and of the generator."""
    target, tokenizer = Target.load(folder, kernels="plain"), Tokenizer.from_dir(folder)
    prompts = [template_prompt(7, i).text for i in range(num_prompts)]
    ids = [tuple(tokenizer.encode_chat([{"role": "user", "content": text}]))[:384] for text in prompts]
    heat = [0.8 if i % 3 == 0 else 0.0 for i in range(num_prompts)]
    engine = Engine(target, tokenizer, batch_size=64)
    generator = Generator(
        target, chat_frame(tokenizer), tokenizer.eos_ids,
        batch_size=min(128, num_prompts), max_prompt_tokens=384, max_answer_tokens=max_tokens, seed=0,
    )  # fmt: skip

    def plain() -> int:
        tokens = 0
        for temperature in (0.0, 0.8):  # one chunk a temperature, as the corpus was made before
            requests = [
                Request(
                    request_id=str(i), prompt_ids=ids[i], category="bench",
                    sampling=Sampling(temperature=temperature, max_tokens=max_tokens),
                )
                for i in range(num_prompts)
                if heat[i] == temperature
            ]  # fmt: skip
            tokens += sum(len(record.output_ids) for record in engine.generate(requests).requests)
        return tokens

    def ours() -> int:
        jobs = [Job(index=i, prompt_ids=ids[i], temperature=heat[i]) for i in range(num_prompts)]
        return sum(len(answer.output_ids) for answer in generator.run(jobs))

    return alternate(plain, ours)


def training(folder: Path, num_steps: int, batch_tokens: int) -> dict[str, object]:
    """Answer tokens a second of one update."""
    target = Target.load(folder, kernels="plain")
    config = target.config
    counts = torch.arange(config.vocab_size, 0, -1)
    vocab = build_vocab(counts, min(8192, config.vocab_size))
    low, middle, high = target.aux_layer_ids
    shape = head_config(config, aux_layer_ids=(low, middle, high), draft_vocab_size=vocab.draft_size)
    plan = TrainPlan(target=folder, output_dir=Path())
    drawn = torch.Generator().manual_seed(0)
    samples = []
    answer, prompt, hidden = 150, 90, config.hidden_size
    for _ in range(batch_tokens // answer):
        ids = torch.randint(0, 8000, (prompt + answer,), generator=drawn)
        samples.append(
            Sample(
                ids=ids,
                answer_start=prompt,
                features=torch.randn(ids.numel(), 3 * hidden, generator=drawn).bfloat16(),
                final=torch.randn(ids.numel(), hidden, generator=drawn).bfloat16(),
                top=torch.cat([ids[1:], ids[:1]]),
            )
        )
    weights = target.state_dict_hf()
    rows = target.lm_head_weight[vocab.target_ids]
    embedding = target.embed_weight.clone()

    def updater(loss_of: Callable[[Eagle3Head], Tensor], *, autocast: bool) -> Callable[[], int]:
        head = Eagle3Head(shape, vocab)
        init_from_target(head, weights)
        optimizer = HeadOptimizer(head, plan)

        def update() -> int:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = loss_of(head)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(head.parameters(), plan.clip)
            optimizer.step(1e-4)
            return answer * len(samples)

        return update

    wide = embedding.float()
    plain = updater(lambda head: plain_loss(head, wide, samples, rows.float(), num_steps), autocast=False)
    batch = collate(samples, num_steps)
    is_bf16 = target.dtype == torch.bfloat16
    ours = updater(
        lambda head: ttt_loss(head, embedding, batch, rows, num_steps=num_steps)[0], autocast=is_bf16
    )
    return alternate(plain, ours)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--num-prompts", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--num-steps", type=int, default=4)
    parser.add_argument("--batch-tokens", type=int, default=1050)
    parser.add_argument("--only", choices=("generation", "training"))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    folder = resolve_model(options.model)
    result: dict[str, object] = {
        "threads": torch.get_num_threads(), "num_steps": options.num_steps, "draft_vocab_size": 8192,
    }  # fmt: skip
    if options.only != "generation":
        result["training"] = training(folder, options.num_steps, options.batch_tokens)
        print(json.dumps(result["training"]), flush=True)
    if options.only != "training":
        result["generation"] = generation(folder, options.num_prompts, options.max_tokens)
    text = json.dumps(result, indent=1)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
