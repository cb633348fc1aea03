"""What people read of a run: a few lines for each stage. The document in, text out."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

_SHOWN_FAILURES = 5
_SHOWN_KERNELS = 6

Json = dict[str, Any]


def format_report(document: Json) -> str:
    """The whole table."""
    lines = []
    for stage in document["stages"]:
        lines.append(
            f"{stage['name']:<14} {stage['status']:<16} {stage['seconds']:6.1f} s of {stage['limit_seconds']:.0f}"
        )
        lines += [f"    {line}" for line in _FORMATS.get(stage["name"], _plain)(stage)]
        lines += [f"    wrong: {_short(case)}" for case in _wrong(stage)[:_SHOWN_FAILURES]]
        lines += [f"    | {line}" for line in stage["error"].splitlines()[-_SHOWN_FAILURES:]]
    note = " (a rehearsal: figures mean nothing)" if document["dry"] else ""
    lines.append(f"{'ok' if document['ok'] else 'NOT OK'} in {document['seconds']:.0f} s{note}")
    return "\n".join(lines)


def _wrong(stage: Json) -> list[Json]:
    return [case for case in stage["cases"] if not case.get("ok", True)]


def _short(case: Json) -> str:
    return ", ".join(f"{name} {value}" for name, value in case.items() if name not in ("ok", "seconds"))[:200]


def _machine(stage: Json) -> list[str]:
    facts = stage["facts"]
    rates = [
        f"{case['name']} {case['gb_per_s']:,.0f} GB/s"
        if "gb_per_s" in case
        else f"{case['name']} {case['tflops']:,.1f} TFLOP/s"
        for case in stage["cases"]
    ]
    versions = " ".join(f"{name} {value}" for name, value in facts.get("versions", {}).items())
    return [f"{facts.get('device')}; {versions}", ", ".join(rates)]


def _kernels(stage: Json) -> list[str]:
    """Per operator: cases, and the worst error in tolerances for each dtype."""
    by_operator: dict[str, list[Json]] = defaultdict(list)
    for case in stage["cases"]:
        by_operator[case["operator"]].append(case)
    lines = []
    for operator, cases in by_operator.items():
        worst: dict[str, float] = {}
        for case in cases:
            if case.get("worst") is not None:
                worst[case["dtype"]] = max(worst.get(case["dtype"], 0.0), case["worst"])
        told = " ".join(f"{dtype} {value:.2f}" for dtype, value in worst.items())
        num_wrong = sum(not case["ok"] for case in cases)
        lines.append(f"{operator:<15} {len(cases):4} cases, {num_wrong} wrong; worst error in tolerances: {told}")
    return lines


def _engine(stage: Json) -> list[str]:
    """Per dtype and mode: architectures, rows, and how many were wrong or equal."""
    groups: dict[tuple[str, str], list[Json]] = defaultdict(list)
    for case in stage["cases"]:
        groups[case["dtype"], case["mode"]].append(case)
    lines = []
    for (dtype, mode), cases in groups.items():
        rows = sum(case.get("rows", 0) for case in cases)
        num_wrong = sum(not case.get("ok", True) for case in cases)
        shares = [case["equal_share"] for case in cases if "equal_share" in case]
        equal = f"; {sum(shares) / len(shares):.0%} of rows equal to alone" if shares else ""
        lines.append(f"{dtype:<9} {mode:<28} {len(cases):3} cases, {rows:4} rows, {num_wrong} cases wrong{equal}")
    return lines + _reasons(stage)


def _reasons(stage: Json) -> list[str]:
    """Why some architectures ran otherwise than they were meant to."""
    lines = []
    for what in ("graphs_off", "launch_errors", "replaced", "skipped"):
        names: dict[str, set[str]] = defaultdict(set)
        for case in stage["cases"]:
            if case.get(what):
                names[str(case[what])].add(case["architecture"])
        lines += [f"{what}: {', '.join(sorted(of))}: {reason[:100]}" for reason, of in names.items()]
    return lines


def _decode(stage: Json) -> list[str]:
    return [
        f"{case['layout']:<5} batch {case['batch']:5} context {case['context']:5}: "
        + (
            case.get("skipped")
            or f"{case['us']:10,.1f} us {case['gb_per_s']:8,.0f} GB/s {_share(case['share_of_copy'])}"
        )
        for case in stage["cases"]
    ]


def _workload(stage: Json) -> list[str]:
    lines = []
    for case in stage["cases"]:
        if "skipped" in case:
            text = case["skipped"]
        elif "idle_share" in case:
            text = f"idle {_share(case['idle_share'])} of {case['trace_seconds']:.1f} s traced, the most time in:"
            shares = list(case["kernel_shares"].items())[:_SHOWN_KERNELS]
            text += "".join(f"\n        {share:6.1%} {name}" for name, share in shares)
        else:
            ended = "" if case["is_complete"] else ", cut off"
            ended += f", no graphs: {case['graphs_off']}" if case["graphs_off"] else ""
            ended += f", launches failed: {case['launch_errors'][0]}" if case["launch_errors"] else ""
            text = (
                f"{case['output_tokens_per_s']:9,.0f} tok/s, step {case['step_ms']:.2f} ms, "
                f"{_share(case['share_of_bound'])} of the bound{ended}"
            )
        lines.append(f"{case['mode']:<24} {text}")
    replaced = stage["facts"].get("replaced")
    return [*lines, f"plain torch in place of {', '.join(replaced)}"] if replaced else lines


def _peer(stage: Json) -> list[str]:
    lines = []
    for case in stage["cases"]:
        name = f"{case['engine']} {case.get('max_requests') or case.get('mode')}"
        lines.append(f"{name:<24} " + (case.get("skipped") or f"{case['output_tokens_per_s']:9,.0f} tok/s"))
    ratio = stage["facts"].get("ratio")
    return [*lines, f"cbgen is {ratio:.2f}x" if ratio else "no ratio"]


def _plain(stage: Json) -> list[str]:
    return [_short(case) for case in stage["cases"]]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


_FORMATS = {
    "machine": _machine,
    "kernels": _kernels,
    "engine": _engine,
    "decode-kernel": _decode,
    "w1-8b": _workload,
    "w5-0.6b": _workload,
    "hf-cb": _peer,
}
