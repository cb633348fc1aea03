"""What people read of a comparison: a table, where our engine's time goes, and a picture. Values in, text out."""

from __future__ import annotations

import statistics
from xml.sax.saxutils import escape

from cbgen.bench.comparison import Comparison, Entry
from cbgen.bench.document import processor_name
from cbgen.bench.engines import describe_knobs
from cbgen.bench.findings import pairwise

_PHASES = {
    "admit_seconds": "take rows in, wait for them",
    "schedule_seconds": "schedule",
    "build_seconds": "build input",
    "run_seconds": "forward",
    "sample_seconds": "sample",
    "update_seconds": "update",
    "write_seconds": "make texts, write",
}
_OWN_COLOUR, _PEER_COLOUR = "#2b6cb0", "#9aa5b1"


def format_comparison(comparison: Comparison) -> str:
    """All of it: what was run, the table, the breakdown, the findings."""
    sections = [_heading(comparison), _table(comparison), _not_run(comparison), _breakdown(comparison)]
    sections.append("\n".join(comparison.findings))
    return "\n\n".join(filter(None, sections))


def _heading(comparison: Comparison) -> str:
    config, workload, machine, limit = comparison.config, comparison.workload, comparison.machine, comparison.bound
    prompt_tokens = sum(map(len, comparison.prompts))
    return "\n".join(
        [
            f"{workload.name} ({workload.scale}, seed {workload.seed}): {workload.num_rows:,} rows, {prompt_tokens:,} "
            f"prompt tokens, {int(workload.lengths.sum()):,} output tokens, forced lengths, greedy",
            f"{comparison.model}, {config.dtype}, {comparison.threads} threads, {processor_name()}",
            f"this machine: {machine.bandwidth / 1e9:,.1f} GB/s read, {machine.flops / 1e12:,.2f} TFLOP/s; bound at "
            f"{comparison.slots} slots: pessimistic {limit.pessimistic:,.0f} tok/s ({limit.weights_seconds:.1f} s "
            f"weights + {limit.kv_seconds:.1f} s KV cache + {limit.arithmetic_seconds:.1f} s arithmetic), optimistic "
            f"{limit.optimistic:,.0f} tok/s",
            "wall time from the first row to the last, without loading and one short request to warm up",
        ]
    )


def _table(comparison: Comparison) -> str:
    reference = comparison.reference
    if reference is None:
        return "no engine ran"
    head = ["engine", "setting", "out tok/s", "min - max", f"{reference.engine.name} is", "peak memory", "of bound"]
    rows = [head]
    for entry in comparison.entries:
        if entry.runs:
            ratio = statistics.median(pairwise(reference, entry))
            rows.append(
                [
                    entry.engine.name,
                    describe_knobs({k: v for k, v in entry.knobs.items() if k not in entry.engine.fixed}) or "-",
                    f"{entry.median:,.0f}",
                    f"{min(entry.speeds):,.0f} - {max(entry.speeds):,.0f}",
                    "-" if entry is reference else f"{ratio:.2f}x",
                    f"{entry.peak_bytes / 1e9:.2f} GB",
                    f"{entry.median / comparison.bound.pessimistic:.2f}",
                ]
            )
    return align(rows, left=2)


def align(rows: list[list[str]], left: int) -> str:
    """Cells in columns: the first `left` columns to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [f"{c:<{w}}" if i < left else f"{c:>{w}}" for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _not_run(comparison: Comparison) -> str:
    return "\n".join(
        f"{entry.engine.name} {entry.status}: {entry.reason}" for entry in comparison.entries if not entry.runs
    )


def breakdown(entry: Entry) -> list[tuple[str, float]]:
    """Where the wall time of the middle run went: (phase, seconds), adding up to all of it."""
    run = entry.middle_run
    stats = dict(run.facts["stats"])
    stats["run_seconds"] -= stats["sample_seconds"]  # which is measured inside
    phases = [(label, float(stats[name])) for name, label in _PHASES.items() if stats[name]]
    return [*phases, ("everything else", max(0.0, run.wall_seconds - sum(seconds for _, seconds in phases)))]


def _breakdown(comparison: Comparison) -> str:
    """Milliseconds a step and share of the wall time, for each of our own engines that ran."""
    parts = []
    for entry in comparison.entries:
        if not entry.runs or not entry.engine.is_own:
            continue
        run = entry.middle_run
        stats = run.facts["stats"]
        steps = max(1, stats["num_steps"])
        slots = run.facts["engine"]["max_num_seqs"]
        occupancy = stats["num_active"] / (steps * slots)
        rows = [
            [f"  {label}", f"{seconds:.2f} s", f"{seconds / steps * 1000:.3f} ms", f"{seconds / run.wall_seconds:.1%}"]
            for label, seconds in breakdown(entry)
        ]
        parts.append(
            f"{entry.engine.name}: {steps:,} steps, occupancy {occupancy:.1%}, {stats['num_preemptions']:,} "
            f"preemptions, {run.wall_seconds / steps * 1000:.1f} ms a step\n" + align(rows, left=1)
        )
    return "\n".join(parts)


def render_svg(comparison: Comparison) -> str:
    """Bars of the medians, a whisker from the slowest to the fastest run, a line at the pessimistic bound."""
    entries = [entry for entry in comparison.entries if entry.runs]
    left, width, lane, top = 230, 560, 30, 64
    height = top + lane * max(1, len(entries)) + 34
    most = max([comparison.bound.pessimistic, *(max(entry.speeds) for entry in entries)])
    scale = width / most
    workload = comparison.workload
    title = (
        f"{workload.name}: {workload.num_rows:,} rows, {int(workload.lengths.sum()):,} output tokens, "
        f"{comparison.model}, {comparison.config.dtype}"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 90} {height}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="100%" height="{height}" fill="#ffffff"/>',
        f'<text x="16" y="24" font-size="15" font-weight="600" fill="#1a1a1a">{escape(title)}</text>',
        '<text x="16" y="44" fill="#555">output tokens a second; bar: median, whisker: slowest to fastest run</text>',
    ]
    for number, entry in enumerate(entries):
        parts += _bar(entry, left, top + number * lane, lane, scale)
    x = left + comparison.bound.pessimistic * scale
    parts += [
        f'<line x1="{x:.1f}" y1="{top - 6}" x2="{x:.1f}" y2="{height - 28}" stroke="#c53030" stroke-dasharray="4 3"/>',
        f'<text x="{x:.1f}" y="{height - 12}" text-anchor="middle" fill="#c53030">bound '
        f"{comparison.bound.pessimistic:,.0f}</text>",
    ]
    return "\n".join([*parts, "</svg>\n"])


def _bar(entry: Entry, left: int, y: int, lane: int, scale: float) -> list[str]:
    colour = _OWN_COLOUR if entry.engine.is_own else _PEER_COLOUR
    middle, low, high = y + lane / 2 - 3, left + min(entry.speeds) * scale, left + max(entry.speeds) * scale
    name = escape(entry.engine.name)
    return [
        f'<text x="{left - 10}" y="{middle + 5:.1f}" text-anchor="end" fill="#1a1a1a">{name}</text>',
        f'<rect x="{left}" y="{y}" width="{entry.median * scale:.1f}" height="{lane - 8}" rx="2" fill="{colour}">'
        f"<title>{name}: median {entry.median:,.0f}, {min(entry.speeds):,.0f} to {max(entry.speeds):,.0f} tok/s</title>"
        "</rect>",
        f'<line x1="{low:.1f}" y1="{middle:.1f}" x2="{high:.1f}" y2="{middle:.1f}" stroke="#1a1a1a" stroke-width="2"/>',
        f'<text x="{high + 8:.1f}" y="{middle + 5:.1f}" fill="#1a1a1a">{entry.median:,.0f}</text>',
    ]
