"""A process that trains the decoder in PyTorch over gloo, without jaxshard: `PYTHON torch_worker.py JSON`.

It prints "> ready". Then, for each number on standard input, it runs that many steps and prints "> SECONDS".
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any

torch: Any = importlib.import_module("torch")
dist: Any = importlib.import_module("torch.distributed")
functional: Any = importlib.import_module("torch.nn.functional")
checkpoint: Any = importlib.import_module("torch.utils.checkpoint").checkpoint


class Block(torch.nn.Module):
    """Attention and MLP, like `jaxshard.apps.zoo.decoders.Decoder.block`."""

    def __init__(self, width: int, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = torch.nn.RMSNorm(width), torch.nn.RMSNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.up = torch.nn.Linear(width, hidden, bias=False)
        self.down = torch.nn.Linear(hidden, width, bias=False)

    def forward(self, x: Any) -> Any:
        """(B, L, D) to (B, L, D)."""
        rows, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Decoder(torch.nn.Module):
    """The model; each block is recomputed in the backward pass, as in JAX."""

    def __init__(self, layers: int, width: int, hidden: int, heads: int, vocabulary: int, length: int):
        super().__init__()
        del length
        self.embed = torch.nn.Embedding(vocabulary, width)
        self.blocks = torch.nn.ModuleList(Block(width, hidden, heads) for _ in range(layers))
        self.norm = torch.nn.RMSNorm(width)
        self.head = torch.nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Any) -> Any:
        """The mean loss of (B, L + 1) ids."""
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def sharded(model: Any, kind: str) -> tuple[Any, Any]:
    """The model and its optimizer for a kind: "one", "ddp", "zero" or "fsdp2"."""
    how = {"lr": 3e-4, "weight_decay": 1e-4}
    if kind == "fsdp2":
        fully_shard = importlib.import_module("torch.distributed.fsdp").fully_shard
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    elif kind != "one":
        model = torch.nn.parallel.DistributedDataParallel(model)
    if kind == "zero":
        redundant = importlib.import_module("torch.distributed.optim").ZeroRedundancyOptimizer
        return model, redundant(model.parameters(), optimizer_class=torch.optim.AdamW, **how)
    return model, torch.optim.AdamW(model.parameters(), **how)


def train(model: Any, optimizer: Any, tokens: Any, count: int) -> float:
    """Runs `count` steps; returns their seconds."""
    start = time.perf_counter()
    for _ in range(count):
        optimizer.zero_grad()
        model(tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return time.perf_counter() - start


def main() -> None:
    """Serves the parent process until it closes standard input."""
    given = json.loads(sys.argv[1])
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // given["processes"]))
    torch.manual_seed(0)
    if given["kind"] != "one":
        address = f"tcp://127.0.0.1:{given['port']}"
        dist.init_process_group("gloo", init_method=address, world_size=given["processes"], rank=given["rank"])
    model, optimizer = sharded(Decoder(**given["sizes"]), given["kind"])
    rows = given["rows"] // given["processes"]
    tokens = torch.randint(0, given["sizes"]["vocabulary"], (rows, given["sizes"]["length"] + 1))
    train(model, optimizer, tokens, 2)
    print("> ready", flush=True)
    for line in sys.stdin:
        print(">", train(model, optimizer, tokens, int(line)), flush=True)
    if given["kind"] != "one":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
