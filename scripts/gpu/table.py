"""The table that a check ends with: under 60 lines, the kernels first, then the steps against the device's rates."""

from collections import Counter
from collections.abc import Iterator, Sequence

from gpu.jobs import Row

FAULTS = 16
"""Lines for single rows that are not well; more are counted."""
BAD = ("wrong", "failed")
STATUSES = ("ok", "wrong", "refused", "failed", "not run")


def exit_code(rows: Sequence[Row]) -> int:
    """0: everything ran and is right, refusals included. 1: something is wrong or failed. 2: not everything ran."""
    seen = {row.outcome.status for row in rows}
    if seen & set(BAD):
        return 1
    return 2 if "not run" in seen else 0


def table(rows: Sequence[Row]) -> str:
    """All of it, as text."""
    lines = [*_kernels(rows), "", *_steps(rows), "", *_faults(rows)]
    return "\n".join(line.rstrip() for line in lines)


def _kernels(rows: Sequence[Row]) -> Iterator[str]:
    yield f"{'kernels against the reference':<34}" + "".join(f"{status:>9}" for status in STATUSES) + "  worst error"
    parts: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.part.startswith("kernels "):
            form = row.name.split(" | ")[0]
            parts.setdefault((row.part.removeprefix("kernels "), form), []).append(row)
    for (operation, form), some in parts.items():
        counts = Counter(row.outcome.status for row in some)
        errors = [row.outcome.figures["error"] for row in some if "error" in row.outcome.figures]
        worst = f"{max(errors):>13.2g}" if errors else f"{'-':>13}"
        yield f"{operation + ', ' + form:<34}" + "".join(f"{counts[status] or '-':>9}" for status in STATUSES) + worst


def _steps(rows: Sequence[Row]) -> Iterator[str]:
    speeds = {row.name: row.outcome.figures for row in rows if row.part == "speeds"}
    copy = speeds.get("copy", {}).get("bytes_per_s", 0.0)
    gemm = speeds.get("gemm", {}).get("flops_per_s", 0.0)
    device = next((row.outcome.why for row in rows if (row.part, row.name) == ("speeds", "copy")), "")
    yield f"measured on {device or 'nothing'}: copy {copy / 1e12:.3g} TB/s, bfloat16 product {gemm / 1e12:.3g} TFLOP/s"
    yield f"{'step':<16}{'forms':<10}{'ms':>10}{'tok/s':>10}{'floor ms':>10}{'floor/ms':>10}"
    for row in rows:
        if row.part.startswith("steps "):
            yield f"{row.name:<16}{row.part.removeprefix('steps '):<10}" + _step(row, copy, gemm)


def _step(row: Row, copy: float, gemm: float) -> str:
    figures = row.outcome.figures
    if "ms" not in figures:
        return f"{row.outcome.status:>10}"
    milliseconds, tokens = figures["ms"], int(row.name.split()[1])
    rate, work = (copy, figures["bytes"]) if "bytes" in figures else (gemm, figures["flops"])
    floor = f"{1e3 * work / rate:>10.2f}{1e3 * work / rate / milliseconds:>10.0%}" if rate else f"{'-':>10}{'-':>10}"
    return f"{milliseconds:>10.2f}{1e3 * tokens / milliseconds:>10.0f}" + floor


def _faults(rows: Sequence[Row]) -> Iterator[str]:
    """What is wrong, row by row; then why kernels refused, each reason once a form."""
    faults = [row for row in rows if row.outcome.status in BAD]
    for row in faults[:FAULTS]:
        yield f"{row.outcome.status}: {row.part}, {row.name}: {row.outcome.why}"[:150]
    if len(faults) > FAULTS:
        yield f"... and {len(faults) - FAULTS} more; --json FILE has all"
    refusals = dict.fromkeys(
        f"refused: {row.part.removeprefix('kernels ')}, {row.name.split(' | ')[0]}: {row.outcome.why}"[:150]
        for row in rows
        if row.outcome.status == "refused"
    )
    yield from list(refusals)[:12]
    not_run = Counter(row.part for row in rows if row.outcome.status == "not run")
    yield from (f"not run: {count} of {part}" for part, count in not_run.items())
