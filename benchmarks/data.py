"""Whether the data pipeline keeps up: tokens it gives a second, against what training eats.

    python benchmarks/data.py --json data.json

A prepared dataset is written to a temporary folder, the synthetic corpus over and over, and read
back from the memory in which the system keeps files just written: `stream` in windows drawn at
random, `packed` in rows of whole documents and pieces of them, whose padding is not counted. Two
kinds of demand stand beside what one process gives, `workers 0` without and `workers N` with N
processes of Grain's that prepare batches for it:

    quickstart     the compiled update of configs/quickstart.py on this machine's devices, fed one
                   batch over and over, measured in the same run
    H200, v5e-256  computed: the chips' dense bfloat16 peak x --mfu / FLOPs a token of
                   configs/gpt2_small.py. Nothing is run

A ratio below 1 means that training waits. `processes` is how many, each reading like `workers 0`,
cover a demand: for v5e-256 on all its hosts together.

Exit codes: 0 done, 2 bad input.
"""

import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import grain
import jax
import numpy as np
import tyro
from _report import Row, make_table, report
from rich.table import Table

from carope_jax import command
from carope_jax.data import (
    DataConfig,
    PreparedDataset,
    PreparedSplit,
    StreamWindows,
    load_corpus,
    make_tokenizer,
    packed_batches,
    train_batches,
)
from carope_jax.data._index import DatasetIndex
from carope_jax.data._shards import ShardWriter
from carope_jax.training import (
    Experiment,
    flops_per_token,
    initial_state,
    make_plan,
    peak_flops,
)

_CONFIGS = Path(__file__).parents[1] / "configs"
_SHARDS = 4
_WARM_UP = 8


class Chips(NamedTuple):
    """So many of a kind, by JAX's name for it."""

    device_kind: str
    count: int


_CHIPS = {"H200": Chips("NVIDIA H200", 1), "v5e-256": Chips("TPU v5e", 256)}


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What is read, and how long each figure is measured."""

    tokens: int = 4_000_000
    """Tokens of the dataset, at least: whole documents."""
    tokenizer: str = "gpt2"
    """What makes the ids, as `data.tokenizer` of an experiment."""
    length: int = 512
    """Tokens of a window."""
    batch_size: int = 32
    """Windows of a batch."""
    workers: tuple[int, ...] = (0, 2)
    """Processes that prepare batches; 0, one thread of this process, among them."""
    seconds: float = 5.0
    """How long each figure is measured, after a warm-up."""
    mfu: float = 0.4
    """Share of the chips' peak that training is assumed to reach."""
    json: Path | None = None
    """Write the rows there: a list of {name, value, unit}."""

    def __post_init__(self) -> None:
        """Raises a ValueError that names the field and the value."""
        for name in ("tokens", "length", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if 0 not in self.workers or min(self.workers) < 0:
            raise ValueError(f"workers must have 0 among them and none below, got {self.workers}")
        if self.seconds <= 0:
            raise ValueError(f"seconds must be above 0, got {self.seconds}")
        if not 0 < self.mfu <= 1:
            raise ValueError(f"mfu must be in (0, 1], got {self.mfu}")


def write_dataset(folder: Path, tokens: int, tokenizer_spec: str) -> PreparedSplit:
    """The synthetic corpus over and over, as a prepared dataset of at least so many tokens."""
    texts = [document.text for document in load_corpus("synthetic")]
    tokenizer = make_tokenizer(tokenizer_spec, texts)
    documents = tokenizer.encode_batch(texts)
    rounds = -(-tokens // (_SHARDS * sum(map(len, documents))))
    shards = []
    for number in range(_SHARDS):
        path = folder / f"train-{number:05d}-of-{_SHARDS:05d}.array_record"
        with ShardWriter(path, tokenizer.vocab_size) as writer:
            for ids_T in documents * rounds:
                writer.add(ids_T)
            shards.append(writer.finish())
    tokenizer.save(folder)
    DatasetIndex(
        tokenizer_hash=tokenizer.hash,
        vocab_size=tokenizer.vocab_size,
        eot_id=tokenizer.eot_id,
        source_fingerprint="synthetic",
        text_column="text",
        validation="none",
        skipped=0,
        splits={"train": tuple(shards)},
    ).write(folder)
    return PreparedDataset.open(folder).split("train")


def pipeline_rate(batches: Iterator[dict[str, np.ndarray]], seconds: float) -> float:
    """Tokens a second that the iterator gives; padding is none."""
    for _ in range(_WARM_UP):  # workers start, and buffers fill
        next(batches)
    tokens, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        batch = next(batches)
        segments_BT = batch.get("segment_ids")
        tokens += batch["inputs"].size if segments_BT is None else np.count_nonzero(segments_BT)
    return tokens / (time.perf_counter() - begun)


def step_rate(experiment: Experiment, seconds: float) -> float:
    """Tokens a second that the experiment's compiled update takes, of one batch over and over."""
    plan = make_plan(experiment)
    state = initial_state(
        experiment.model, plan.model, plan.layout.optimizer, experiment.training.seed
    )
    rng = np.random.default_rng(0)
    batch = {
        name: jax.device_put(
            rng.integers(0, experiment.model.vocab_size, shape.shape, shape.dtype), shape.sharding
        )
        for name, shape in plan.layout.batch.items()
    }
    for _ in range(_WARM_UP):
        state, metrics = plan.step(state, batch)
    jax.block_until_ready(metrics)
    updates, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        state, metrics = plan.step(state, batch)
        jax.block_until_ready(metrics)
        updates += 1
    return updates * experiment.tokens_per_update / (time.perf_counter() - begun)


def chip_rate(chips: Chips, mfu: float) -> float:
    """Tokens a second that the chips would take of configs/gpt2_small.py at a share of their peak.

    Raises:
      ValueError: the peak of the chips is not known.
    """
    experiment = command.load_config(_CONFIGS / "gpt2_small.py")
    peak = peak_flops(chips)
    if peak is None:
        raise ValueError(f"the peak of {chips.device_kind!r} is not known")
    return chips.count * peak * mfu / flops_per_token(experiment.model, experiment.data.length)


def quickstart() -> Experiment:
    """configs/quickstart.py with the vocabulary that its tokenizer, `train:N`, will have."""
    experiment = command.load_config(_CONFIGS / "quickstart.py")
    return experiment.resolved(int(experiment.data.tokenizer.removeprefix("train:")))


def pipelines(
    split: PreparedSplit, arguments: Arguments
) -> Iterator[tuple[str, grain.DatasetIterator[dict[str, np.ndarray]]]]:
    """Each pipeline by name, open until the next one is asked for."""
    for name, make in (("stream", train_batches), ("packed", packed_batches)):
        for workers in arguments.workers:
            config = DataConfig(
                length=arguments.length, batch_size=arguments.batch_size, workers=workers
            )
            with contextlib.closing(make(split, config)) as batches:
                yield f"{name}/workers {workers}", batches


def measure(split: PreparedSplit, arguments: Arguments) -> list[Row]:
    """Tokens a second that come and that are wanted, and their ratios."""
    demands = {"quickstart": step_rate(quickstart(), arguments.seconds)} | {
        name: chip_rate(chips, arguments.mfu) for name, chips in _CHIPS.items()
    }
    rows = [Row(f"demand/{name}", rate, "token/s") for name, rate in demands.items()]
    for supply, batches in pipelines(split, arguments):
        rate = pipeline_rate(batches, arguments.seconds)
        rows.append(Row(supply, rate, "token/s"))
        for name, demand in demands.items():
            rows.append(Row(f"{supply}/ratio to {name}", rate / demand, "1"))
            if supply.endswith("/workers 0"):
                rows.append(Row(f"{supply}/processes for {name}", demand / rate, "process"))
    return rows


def tables(rows: Sequence[Row], arguments: Arguments) -> list[Table]:
    """What is wanted, and what comes."""
    value = {row.name: row.value for row in rows}
    supplies = [
        row.name for row in rows if row.unit == "token/s" and not row.name.startswith("demand/")
    ]
    alone = [name for name in supplies if name.endswith("/workers 0")]
    demands = ["quickstart", *_CHIPS]
    wanted = [
        (
            name,
            f"{value[f'demand/{name}']:,.0f}",
            *(f"{value[f'{supply}/processes for {name}']:.3g}" for supply in alone),
        )
        for name in demands
    ]
    given = [
        (
            supply,
            f"{value[supply]:,.0f}",
            *(f"{value[f'{supply}/ratio to {name}']:.3g}" for name in demands),
        )
        for supply in supplies
    ]
    return [
        make_table(
            f"Wanted (of the chips at an MFU of {arguments.mfu}), and processes that cover it",
            ("training", "tokens/s", *(supply.partition("/")[0] for supply in alone)),
            wanted,
        ),
        make_table(
            "Given, and its ratio to what is wanted", ("pipeline", "tokens/s", *demands), given
        ),
    ]


def main(argv: Sequence[str]) -> None:
    """Reads the arguments, writes the dataset, measures, reports."""
    with tempfile.TemporaryDirectory() as folder:
        with command.input_errors():
            arguments = tyro.cli(Arguments, description=__doc__, args=argv)
            split = write_dataset(Path(folder), arguments.tokens, arguments.tokenizer)
            StreamWindows(split, arguments.length)  # raises where there is none
        rows = measure(split, arguments)
    report(rows, tables(rows, arguments), arguments.json)


if __name__ == "__main__":
    command.run(main)
