"""What a compiled GPU program asks of the host: counted in its optimised HLO, no GPU needed."""

import re
from dataclasses import dataclass

# Instructions that start nothing on the device.
_FREE = {
    "after-all", "bitcast", "constant", "copy-done", "fusion-done", "get-tuple-element", "opt-barrier", "parameter",
    "partition-id", "replica-id", "tuple",
}  # fmt: skip
_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.-]+) .*\{$")
_OPERATION = re.compile(r"^\s+(?:ROOT )?%[\w.-]+ = .*?\s([a-z][\w-]*)\(")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_BODY = re.compile(r"\bbody=%([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{[^}]*\}|true_computation=%[\w.-]+, false_computation=%[\w.-]+")
_CALLED = re.compile(r"to_apply=%([\w.-]+)")


@dataclass(frozen=True)
class Launches:
    """Most that one run of a program can need.

    Attributes:
        kernels: launches, those of a loop's body times its known trips (once if XLA does not know them); of a
            condition the larger branch.
        syncs: conditions, each of which waits for the device.
    """

    kernels: int = 0
    syncs: int = 0

    def __add__(self, other: "Launches") -> "Launches":
        return Launches(self.kernels + other.kernels, self.syncs + other.syncs)

    def __mul__(self, times: int) -> "Launches":
        return Launches(self.kernels * times, self.syncs * times)


def count_launches(optimised_hlo: str) -> Launches:
    """Counts in what `compiled.as_text()` gives of a program for a GPU.

    Raises:
        ValueError: the text has no entry computation.
    """
    bodies: dict[str, list[str]] = {}
    entry = name = None
    for line in optimised_hlo.splitlines():
        if header := _COMPUTATION.match(line):
            name = header[2]
            bodies[name] = []
            entry = name if header[1] else entry
        elif name is not None:
            bodies[name].append(line)
    if entry is None:
        raise ValueError("the text is no HLO module: no line starts with ENTRY")
    return _count(entry, bodies)


def _count(computation: str, bodies: dict[str, list[str]]) -> Launches:
    total = Launches()
    for line in bodies[computation]:
        operation = _OPERATION.match(line)
        if operation is None or operation[1] in _FREE:
            continue
        if operation[1] == "while":
            trips, body = _TRIPS.search(line), _BODY.search(line)
            assert body is not None, line
            total += _count(body[1], bodies) * (int(trips[1]) if trips else 1)
        elif operation[1] == "conditional":
            branches = _BRANCHES.search(line)
            assert branches is not None, line
            counts = [_count(name, bodies) for name in re.findall(r"%([\w.-]+)", branches[0])]
            total += Launches(syncs=1) + max(counts, key=lambda count: count.kernels)
        elif operation[1] == "call":
            called = _CALLED.search(line)
            assert called is not None, line
            total += _count(called[1], bodies)
        else:
            total += Launches(kernels=1)
    return total
