"""Text from a trained run, token by token, past its training length too.

    python -m carope_jax.generate --workdir runs/a --prompt "In the beginning"
    python -m carope_jax.generate --workdir runs/a --file prompts.txt --json out.json

A prompt's text streams to the standard output. A file has a prompt a line; its texts are written
once they are done. Needs only the run's folder.

Exit codes: 0 done, 2 bad input.
"""

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro
from rich.console import Console

from carope_jax import command
from carope_jax.generation import Completion, Generator, SamplingConfig, TextStream
from carope_jax.training import LoadedRun, load_run


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Which run, what to go on from, and how."""

    workdir: Path
    """The run's folder."""
    sampling: Annotated[SamplingConfig, tyro.conf.arg(name="")]
    prompt: str | None = None
    """What the text begins with; may be empty: a new text."""
    file: Path | None = None
    """A file with a prompt a line, in place of --prompt."""
    batch_size: int = 8
    """Prompts of a file that are completed at once."""
    step: int | None = None
    """Which checkpoint; the newest by default."""
    json: Path | None = None
    """Write prompts, texts and token counts there: a list of objects."""


def main(argv: Sequence[str]) -> None:
    """Reads the arguments, loads the run, writes the text."""
    with command.input_errors():
        arguments = tyro.cli(
            Arguments, prog="python -m carope_jax.generate", description=__doc__, args=argv
        )
        prompts = _prompts(arguments)
        run = load_run(arguments.workdir, step=arguments.step, devices=jax.devices()[:1])
        tokenizer = run.tokenizer
        generator = Generator(
            run.model.merge(run.state.params, run.state.constants),
            vocab_size=tokenizer.vocab_size,
            eot_id=tokenizer.eot_id,
            sampling=arguments.sampling,
            batch_size=min(arguments.batch_size, len(prompts)),
        )
        ids = [tokenizer.encode(prompt).tolist() for prompt in prompts]
        generator.check(ids)
    notes = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    begun = time.perf_counter()
    if arguments.prompt is not None:
        completions = _stream(run, generator, prompts[0], ids[0])
    else:
        with notes.status("") as status:
            drawn = 0

            def progress(tokens: int) -> None:
                nonlocal drawn
                drawn += tokens
                status.update(f"{drawn} tokens")

            completions = generator.complete(ids, progress)
        for completion in completions:
            text = tokenizer.decode(ids[completion.prompt] + completion.tokens)
            print(f"[{completion.prompt}] {text}")
    seconds = time.perf_counter() - begun
    new = sum(len(completion.tokens) for completion in completions)
    notes.print(
        f"{new} tokens in {seconds:.1f} s, compilation included; trained at "
        f"{run.experiment.data.length} tokens, step {int(run.state.step)}"
    )
    with command.input_errors():
        rows = [_row(run, prompts, ids, completion) for completion in completions]
        command.write_json(arguments.json, rows)


def _prompts(arguments: Arguments) -> list[str]:
    if (arguments.prompt is None) == (arguments.file is None):
        raise ValueError("give --prompt TEXT or --file FILE")
    if arguments.batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {arguments.batch_size}")
    if arguments.prompt is not None:
        return [arguments.prompt]
    prompts = arguments.file.read_text(encoding="utf-8").splitlines() if arguments.file else []
    if not prompts:
        raise ValueError(f"{arguments.file} has no prompts")
    return prompts


def _stream(run: LoadedRun, generator: Generator, prompt: str, ids: list[int]) -> list[Completion]:
    tokenizer, drawn = run.tokenizer, []
    text = TextStream(tokenizer.decode, ids)
    print(prompt, end="", flush=True)
    for [(_, token)] in generator.stream([ids]):
        drawn.append(token)
        if token != tokenizer.eot_id:
            print(text.push(token), end="", flush=True)
    print(text.finish(), flush=True)
    return [Completion.of(0, drawn, tokenizer.eot_id)]


def _row(
    run: LoadedRun, prompts: list[str], ids: list[list[int]], completion: Completion
) -> dict[str, Any]:
    whole = run.tokenizer.decode(ids[completion.prompt] + completion.tokens)
    before = run.tokenizer.decode(ids[completion.prompt]) if ids[completion.prompt] else ""
    return {
        "prompt": prompts[completion.prompt],
        "text": whole[len(before) :],
        "prompt_tokens": len(ids[completion.prompt]),
        "tokens": len(completion.tokens),
        "ended": completion.ended,
    }


if __name__ == "__main__":
    command.run(main, sys.argv[1:])
