"""What a compiled program moves, read off its HLO text: collectives and bytes, loops counted.

XLA's own cost analysis counts a loop's body once, however often it runs.
"""

import collections
import dataclasses
import math
import re

_BITS = {"pred": 8, "token": 0, "opaque": 0, "s4": 4, "u4": 4, "c64": 64, "c128": 128}
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](\{[^}]*\})?")
_COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "collective-permute",
    "all-to-all",
    "ragged-all-to-all",
)
_FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "conditional",
    "call",
    "iota",
    "after-all",
    "partition-id",
    "replica-id",
    "opt-barrier",
}
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|called_computations)=\{?%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of one kind in a run of the program, on one chip.

    Attributes:
      count: how many, those in a loop as often as it turns.
      bytes: the larger of what goes in and what comes out, summed.
    """

    count: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What one run of a program moves, on one chip.

    Attributes:
      collectives: by kind.
      hbm_bytes: read from and written to the chip's main memory, operation by operation.
      loops: how often each loop turns, in the program's order; None: not known, counted once.
    """

    collectives: dict[str, Collective]
    hbm_bytes: int
    loops: tuple[int | None, ...]


class _Instruction:
    """A line of HLO: `%name = result opcode(operands), attributes`."""

    def __init__(self, line: str) -> None:
        name, _, rest = line.strip().removeprefix("ROOT ").partition(" = ")
        self.name, self.root = name.lstrip("%"), line.lstrip().startswith("ROOT ")
        end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
        self.result, rest = rest[:end], rest[end:].lstrip()
        self.opcode, _, _ = rest.partition("(")
        start = len(self.opcode)
        end = _closing(rest, start)
        self.inside = rest[start + 1 : end]
        self.operands = re.findall(r"%([\w.\-]+)", self.inside)
        self.attributes = rest[end + 1 :]

    @property
    def called(self) -> list[str]:
        """The computations it runs."""
        found = _CALLED.findall(self.attributes)
        for branches in _BRANCHES.findall(self.attributes):
            found += re.findall(r"%?([\w.\-]+)", branches)
        return found


def _closing(text: str, start: int) -> int:
    depth = 0
    for place in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place
    raise ValueError(f"no closing bracket in {text[:80]!r}")


_Computation = dict[str, _Instruction]


def _parse(text: str) -> tuple[dict[str, _Computation], str]:
    computations: dict[str, _Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if header and " = " not in line.partition("(")[0]:
            current = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and " = " in line:
            instruction = _Instruction(line)
            current[instruction.name] = instruction
    if entry not in computations:
        raise ValueError("the text is not an HLO module: it has no ENTRY computation")
    return computations, entry


def _bits(kind: str) -> int:
    digits = re.match(r"[a-z]+(\d+)", kind)
    return _BITS.get(kind, int(digits[1]) if digits else 0)


def _size(shape: str, *, main_memory: bool = False) -> int:
    """Bytes of all arrays of a type; of those in the main memory, if asked."""
    total = 0
    for kind, sizes, layout in _ARRAY.findall(shape):
        space = re.search(r"S\((\d+)\)", layout)
        if not (main_memory and space and space[1] != "0"):
            count = math.prod(int(size) for size in sizes.split(",") if size)
            total += -(-count * _bits(kind) // 8)
    return total


def traffic(text: str) -> Traffic:
    """What a program moves, from the text of its compiled HLO module.

    A loop turns as often as the compiler says (`known_trip_count`), or else as often as a counter
    from 0 stays below the one constant its condition compares it with, which is what JAX's scans
    become.

    Raises:
      ValueError: it is no HLO text.
    """
    computations, entry = _parse(text)
    counts: dict[str, int] = collections.Counter()
    sizes: dict[str, int] = collections.Counter()
    loops: list[int | None] = []
    moved = 0

    def visit(name: str, times: int, fused: bool) -> None:
        nonlocal moved
        computation = computations[name]
        for instruction in computation.values():
            kind = instruction.opcode.removesuffix("-start")
            if kind in _COLLECTIVES:
                counts[kind] += times
                sizes[kind] += times * max(
                    _largest(instruction), sum(_size(o) for o in _types(computation, instruction))
                )
            if not fused:
                moved += times * _moved(computations, computation, instruction)
            turns = 1
            if instruction.opcode == "while":
                known = _turns(computations, instruction)
                loops.append(known)
                turns = known or 1
            inner = fused or instruction.opcode not in ("while", "conditional", "call")
            for called in instruction.called:
                if called in computations:
                    visit(called, times * turns, inner)

    visit(entry, 1, False)
    kinds = {kind: Collective(counts[kind], sizes[kind]) for kind in sorted(counts)}
    return Traffic(kinds, moved, tuple(loops))


def _types(computation: _Computation, instruction: _Instruction) -> list[str]:
    return [computation[o].result for o in instruction.operands if o in computation]


def _largest(instruction: _Instruction) -> int:
    """Bytes that come out. What starts gives back its operand as well."""
    if not instruction.opcode.endswith("-start") or not instruction.result.startswith("("):
        return _size(instruction.result)
    return max(_size(found[0]) for found in re.finditer(_ARRAY, instruction.result))


def _turns(computations: dict[str, _Computation], loop: _Instruction) -> int | None:
    told = re.search(r'known_trip_count\\?":\{\\?"n\\?":\\?"(\d+)', loop.attributes)
    if told:
        return int(told[1])
    condition = re.search(r"condition=%?([\w.\-]+)", loop.attributes)
    if condition is None:
        return None
    body = computations[condition[1]]
    constants = [i.inside for i in body.values() if i.opcode == "constant"]
    below = [
        i
        for name in (condition[1], *(c for i in body.values() for c in i.called))
        for i in computations[name].values()
        if i.opcode == "compare" and "direction=LT" in i.attributes
    ]
    if len(constants) == len(below) == 1 and constants[0].isdigit():
        return int(constants[0])
    return None


def _moved(
    computations: dict[str, _Computation], computation: _Computation, instruction: _Instruction
) -> int:
    """Bytes of the main memory that an operation reads and writes."""
    opcode = instruction.opcode
    if opcode in _FREE:
        return 0
    types = [computation[o].result if o in computation else "" for o in instruction.operands]
    if opcode in ("dynamic-slice", "gather", "slice"):
        return 2 * _size(instruction.result, main_memory=True)
    if opcode == "dynamic-update-slice":
        return 2 * _size(types[1], main_memory=True)
    written = 0 if opcode.endswith("-start") else _size(instruction.result, main_memory=True)
    if opcode.endswith("-done"):
        return written
    called = [computations[c] for c in instruction.called if c in computations]
    if not called or opcode not in ("fusion", "async-start"):
        return written + sum(_size(t, main_memory=True) for t in types)
    inner = called[0]
    read = sum(
        min(_size(t, main_memory=True), _read(computations, inner, place))
        for place, t in enumerate(types)
    )
    return read + min(written, _written(inner))


def _read(computations: dict[str, _Computation], inner: _Computation, place: int) -> int:
    """Bytes of a fusion's operand that it reads: slices, where it takes nothing else of it."""
    name = next(
        (i.name for i in inner.values() if i.opcode == "parameter" and i.inside == str(place)), None
    )
    if name is None:
        return 0
    total, names = 0, [name]
    while names:
        looked_at = names.pop()
        for user in inner.values():
            for position, operand in enumerate(user.operands):
                if operand != looked_at:
                    continue
                if user.opcode == "bitcast":
                    names.append(user.name)
                elif user.opcode in ("dynamic-slice", "gather", "slice") and position == 0:
                    total += _size(user.result)
                elif user.opcode == "dynamic-update-slice" and position == 0:
                    pass  # written into, in place
                elif user.opcode == "fusion" and user.called[0] in computations:
                    total += _read(computations, computations[user.called[0]], position)
                else:
                    total += _size(inner[looked_at].result)
    return total


def _written(inner: _Computation) -> int:
    """Bytes that a fusion writes: the update alone, where it updates a slice in place."""
    total = 0
    for name in [i.name for i in inner.values() if i.root]:
        root = inner[name]
        for part in root.operands if root.opcode == "tuple" else [name]:
            made = inner[part]
            while made.opcode == "bitcast" and made.operands[0] in inner:
                made = inner[made.operands[0]]
            update = made.opcode == "dynamic-update-slice"
            total += _size(inner[made.operands[1]].result if update else made.result)
    return total
