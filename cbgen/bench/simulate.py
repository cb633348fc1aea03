"""`cbgen simulate`: the engine's own scheduler on a virtual clock, with rows whose lengths are known.

Nothing is generated: each step "samples" one token for every sequence that is ready, and takes `step_ms` plus
`prefill_ms_per_token` for each prompt token it reads and `row_ms` for each token it samples. So the schedule printed
here is the schedule `cbgen run` makes of the same lengths. Enters: lengths and arrival times. Leaves: a `Simulation`,
and from it a table, a text timeline, an SVG.
"""

from __future__ import annotations

import colorsys
import math
import re
from collections import deque
from dataclasses import dataclass
from xml.sax.saxutils import escape

import numpy as np

from cbgen.engine.block_manager import BlockManager
from cbgen.engine.scheduler import Batching, Scheduler, SchedulerConfig
from cbgen.engine.sequence import Sequence
from cbgen.engine.waiting import ROWS_PER_SLOT, Order
from cbgen.params import SamplingParams

_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
_MAX_ROWS = 20_000
_MAX_TOKENS = 1_000_000  # to generate, and as many of prompts: some seconds for each policy
_MAX_SLOTS = 1024
_MAX_CELLS = 20_000_000  # of the block table: slots x longest row
_MAX_MS = 1e12  # thirty years


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Rows to schedule. Times are in milliseconds.

    Attributes:
        lengths: output tokens of each row, in file order.
        prompt_lengths: prompt tokens of each row; same length as `lengths`.
        arrivals_ms: when each row arrives; same length as `lengths`.
        step_ms, row_ms: a step takes `step_ms`, and `row_ms` more for each row that gets a token in it: next to nothing
            on a GPU with room to spare, most of a step on a CPU.
    """

    lengths: list[int]
    prompt_lengths: list[int]
    arrivals_ms: list[float]
    slots: int
    step_ms: float
    prefill_ms_per_token: float = 0.0
    row_ms: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what cannot be simulated, or not in bounded time and memory.

        Raises:
            ValueError: the message names the option.
        """
        if not self.lengths:
            raise ValueError("--lengths names no row")
        if len({len(self.lengths), len(self.prompt_lengths), len(self.arrivals_ms)}) != 1:
            raise ValueError(
                f"{len(self.lengths)} lengths, {len(self.prompt_lengths)} prompt lengths and {len(self.arrivals_ms)} "
                "arrivals: give one value, or one for each row"
            )
        if min(self.lengths) < 1 or min(self.prompt_lengths) < 1:
            raise ValueError("each row needs at least one token to generate and one of prompt")
        _check_range("--slots", self.slots, 1, _MAX_SLOTS)
        _check_range("--step-ms", self.step_ms, 0.001, 1e9)
        _check_range("--prefill-ms-per-token", self.prefill_ms_per_token, 0, 1e6)
        _check_range("--row-ms", self.row_ms, 0, 1e6)
        for arrival in self.arrivals_ms:
            _check_range("--arrivals", arrival, 0, _MAX_MS)
        self._check_size()

    def _check_size(self) -> None:
        if len(self.lengths) > _MAX_ROWS:
            raise ValueError(f"{len(self.lengths):,} rows are too many to simulate; the most is {_MAX_ROWS:,}")
        for option, tokens in (("--lengths", sum(self.lengths)), ("--prompt-lengths", sum(self.prompt_lengths))):
            if tokens > _MAX_TOKENS:
                raise ValueError(f"{option} come to {tokens:,} tokens; the most that is simulated is {_MAX_TOKENS:,}")
        longest = max(self.lengths) + max(self.prompt_lengths)
        if longest * self.slots > _MAX_CELLS:
            raise ValueError(
                f"{self.slots} slots of {longest:,} tokens are too many to simulate; lower --slots or the lengths"
            )

    @property
    def ideal_steps(self) -> int:
        """Steps if no slot ever idled: tokens over slots, and never below the longest row."""
        return max(-(-sum(self.lengths) // self.slots), max(self.lengths))


@dataclass(frozen=True, slots=True)
class Span:
    """A row's stay in one slot, in milliseconds of virtual time."""

    row: int
    slot: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """What one policy made of a workload."""

    name: str
    num_steps: int
    total_ms: float
    response_ms: list[float]  # per row: from its arrival to its last token
    spans: list[Span]
    occupancy: float  # active slots / (steps x slots)
    num_tokens: int

    @property
    def mean_response_ms(self) -> float:
        return sum(self.response_ms) / len(self.response_ms)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.total_ms * 1000


def simulate(workload: Workload, batching: Batching, order: Order = "file") -> Simulation:
    """Run the real `Scheduler` over the workload until the last row ends."""
    scheduler = _make_scheduler(workload, batching, order)
    sequences = [_make_sequence(workload, row) for row in range(len(workload.lengths))]
    arriving = deque(sorted(range(len(sequences)), key=lambda row: (workload.arrivals_ms[row], row)))
    look_ahead = ROWS_PER_SLOT * workload.slots
    clock_ms, num_steps, num_active = 0.0, 0, 0
    entered: dict[int, tuple[int, float]] = {}  # row -> (slot, time)
    spans: list[Span] = []
    response_ms = [0.0] * len(sequences)
    while arriving or scheduler.has_unfinished:
        if not scheduler.has_unfinished:
            clock_ms = max(clock_ms, workload.arrivals_ms[arriving[0]])
        while arriving and workload.arrivals_ms[arriving[0]] <= clock_ms and scheduler.num_waiting < look_ahead:
            scheduler.add(sequences[arriving.popleft()])
        output = scheduler.schedule()
        for sequence in output.sequences:
            entered.setdefault(sequence.index, (sequence.slot, clock_ms))
        table, slots = output.table, output.slots
        num_unread = np.maximum(table.num_prompt_tokens[slots] - table.num_computed_tokens[slots], 0)
        num_prompt_tokens = int(np.minimum(num_unread, output.num_scheduled_tokens).sum())
        num_steps += 1
        num_active += scheduler.num_running
        num_sampled = int(output.samples.sum())
        clock_ms += workload.step_ms + num_prompt_tokens * workload.prefill_ms_per_token + num_sampled * workload.row_ms
        for sequence in scheduler.update(output, np.zeros(num_sampled, dtype=np.int64)):
            slot, start_ms = entered[sequence.index]
            spans.append(Span(sequence.index, slot, start_ms, clock_ms))
            response_ms[sequence.index] = clock_ms - workload.arrivals_ms[sequence.index]
    name = batching if order == "file" else f"{batching}, {order} first"
    occupancy = num_active / (num_steps * workload.slots)
    return Simulation(name, num_steps, clock_ms, response_ms, spans, occupancy, sum(workload.lengths))


def simulate_policies(workload: Workload) -> list[Simulation]:
    """The comparison that is printed: the baseline, the engine's default, and longest rows first."""
    return [
        simulate(workload, "static"),
        simulate(workload, "continuous"),
        simulate(workload, "continuous", order="longest"),
    ]


def _make_scheduler(workload: Workload, batching: Batching, order: Order) -> Scheduler:
    """A scheduler with room for everything: what is shown is the policy, not a lack of memory."""
    longest = max(p + n for p, n in zip(workload.prompt_lengths, workload.lengths, strict=True))
    config = SchedulerConfig(
        max_num_seqs=workload.slots,
        max_num_batched_tokens=max(workload.slots, sum(sorted(workload.prompt_lengths)[-workload.slots :])),
        max_model_len=longest,
        batching=batching,
        order=order,
    )
    return Scheduler(config, BlockManager(longest * workload.slots * 2, 1, workload.slots, longest))


def _make_sequence(workload: Workload, row: int) -> Sequence:
    num_prompt, length = workload.prompt_lengths[row], workload.lengths[row]
    return Sequence(
        index=row,
        prompt_token_ids=np.zeros(num_prompt, dtype=np.int32),
        params=SamplingParams(max_tokens=length),
        max_total_tokens=num_prompt + length,
    )


# -- what a person types ----------------------------------------------------------------------------------------------


def parse_numbers(text: str, option: str = "--lengths") -> list[float]:
    """`100,20,(20,200)*50` as a flat list; `(...)*N` repeats a group, `X*N` one number.

    Raises:
        ValueError: the text is not of that form, or names more numbers than rows are simulated.
    """
    numbers: list[float] = []
    rest = re.sub(r"\s", "", text)
    while rest:
        match = re.match(rf"(?:\(({_NUMBER}(?:,{_NUMBER})*)\)|({_NUMBER}))(?:\*([0-9]+))?(?:,|$)", rest)
        if match is None:
            raise ValueError(f"{option}: cannot read {rest[:40]!r}; write numbers like 100,20,50 or (20,200)*50")
        group, single, times = match.groups()
        values = [float(number) for number in (group or single).split(",")]
        repeats = int(times[:12]) if times else 1  # more digits are too many anyway
        if len(numbers) + len(values) * repeats > _MAX_ROWS:
            raise ValueError(f"{option} names too many rows to simulate; the most is {_MAX_ROWS:,}")
        numbers += values * repeats
        rest = rest[match.end() :]
    return numbers


def parse_whole_numbers(text: str, option: str = "--lengths") -> list[int]:
    """The same for what is counted.

    Raises:
        ValueError: as `parse_numbers`, and for a number with a fraction.
    """
    numbers = parse_numbers(text, option)
    broken = next((number for number in numbers if not number.is_integer()), None)  # neither is infinity
    if broken is not None:
        raise ValueError(f"{option} must be whole numbers of tokens, not {broken:g}")
    return [int(number) for number in numbers]


def _check_range(option: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:  # also refuses NaN
        raise ValueError(f"{option} must be from {least:g} to {most:g}, not {value:g}")


# -- what a person reads ----------------------------------------------------------------------------------------------


def row_name(row: int) -> str:
    """A, B, ... Z, AA, AB, ... as in a spreadsheet."""
    name = ""
    row += 1
    while row:
        row, letter = divmod(row - 1, 26)
        name = chr(ord("A") + letter) + name
    return name


def format_report(workload: Workload, simulations: list[Simulation]) -> str:
    """The comparison as aligned text: totals for every policy, and each row's response time while they fit a screen."""
    lines = [f"{'':<28}" + "".join(f"{s.name:>28}" for s in simulations)]

    def add(label: str, cells: list[str]) -> None:
        lines.append(f"{label:<28}" + "".join(f"{cell:>28}" for cell in cells))

    add("total", [f"{s.total_ms / 1000:.1f} s ({s.num_steps:,} steps)" for s in simulations])
    add("throughput", [f"{s.tokens_per_second:.0f} tok/s" for s in simulations])
    add("occupancy", [f"{s.occupancy:.1%}" for s in simulations])
    if len(workload.lengths) <= 26:
        for row, length in enumerate(workload.lengths):
            label = f"response {row_name(row)} ({length} tokens)"
            add(label, [f"{s.response_ms[row] / 1000:.1f} s" for s in simulations])
    add("mean response", [f"{s.mean_response_ms / 1000:.1f} s" for s in simulations])
    baseline, ideal = simulations[0], workload.ideal_steps
    add("speed-up", [f"{baseline.total_ms / s.total_ms:.2f}x" for s in simulations])
    gains = [b / c for b, c in zip(baseline.response_ms, simulations[1].response_ms, strict=True)]
    best = max(range(len(gains)), key=gains.__getitem__)
    if gains[best] > 1:
        lines.append(f"\nrow {row_name(best)} answers {gains[best]:.1f}x sooner with continuous batching")
    seconds = (ideal * workload.step_ms + sum(workload.lengths) * workload.row_ms) / 1000
    lines.append(
        f"ideal (no slot ever idle): {ideal:,} steps, {seconds:.1f} s, {sum(workload.lengths) / seconds:.0f} tok/s, "
        f"{baseline.total_ms / 1000 / seconds:.1f}x static"
    )
    return "\n".join(lines)


def format_timelines(simulations: list[Simulation], slots: int, width: int = 72) -> list[str]:
    """Each policy's slots as lines of text, time to the right on a common scale.

    A row fills its stay with its letter (with the last letter of its name, past Z); an idle slot shows dots.
    """
    scale = width / max(simulation.total_ms for simulation in simulations)
    lines = []
    for simulation in simulations:
        lines.append(f"{simulation.name} ({simulation.total_ms / 1000:.1f} s)")
        stays: dict[int, list[Span]] = {slot: [] for slot in range(slots)}
        for span in simulation.spans:
            stays[span.slot].append(span)
        for slot in range(slots):
            cells = ["."] * round(simulation.total_ms * scale)
            for span in stays[slot]:
                first, last = round(span.start_ms * scale), round(span.end_ms * scale)
                cells[first:last] = row_name(span.row)[-1] * (last - first)
            lines.append(f"  slot {slot:<3}|{''.join(cells):<{width}}|")
    return lines


def render_svg(simulations: list[Simulation], slots: int) -> str:
    """The timelines as one self-contained SVG, one panel per policy on a common time axis."""
    left, width, lane, head = 70, 900, 22, 34
    scale = width / max(s.total_ms for s in simulations)
    panel = head + slots * lane + 14
    height = panel * len(simulations) + 26
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 20} {height}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="100%" height="{height}" fill="#ffffff"/>',
    ]
    for number, simulation in enumerate(simulations):
        top = number * panel
        title = f"{simulation.name}: {simulation.total_ms / 1000:.1f} s, {simulation.occupancy:.0%} of slot time used"
        parts.append(f'<text x="{left}" y="{top + 22}" font-weight="600" fill="#1a1a1a">{escape(title)}</text>')
        for slot in range(slots):
            y = top + head + slot * lane
            parts.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end" fill="#555">slot {slot}</text>')
            span_width = simulation.total_ms * scale
            parts.append(f'<rect x="{left}" y="{y}" width="{span_width:.1f}" height="{lane - 3}" fill="#eeeeee"/>')
        parts += [_svg_span(span, left, top + head, lane, scale) for span in simulation.spans]
    parts += _svg_axis(max(s.total_ms for s in simulations), left, height - 8, scale)
    return "\n".join([*parts, "</svg>\n"])


def _svg_axis(total_ms: float, left: int, y: int, scale: float) -> list[str]:
    """Labels in seconds, about ten of them, at round distances."""
    rough = total_ms / 1000 / 10
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    times = [step * number for number in range(int(total_ms / 1000 / step) + 1)]
    return [
        f'<text x="{left + time * 1000 * scale:.1f}" y="{y}" text-anchor="middle" fill="#555">{time:g} s</text>'
        for time in times
    ]


def _svg_span(span: Span, left: int, top: int, lane: int, scale: float) -> str:
    x, width = left + span.start_ms * scale, (span.end_ms - span.start_ms) * scale
    y = top + span.slot * lane
    red, green, blue = colorsys.hls_to_rgb(
        span.row * 137 % 360 / 360, 0.42, 0.5
    )  # golden-angle steps: neighbours differ
    colour = f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"
    label = row_name(span.row)
    text = f'<text x="{x + width / 2:.1f}" y="{y + 14}" text-anchor="middle" fill="#fff">{label}</text>'
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{max(width - 1, 0.5):.1f}" height="{lane - 3}" rx="2" '
        f'fill="{colour}"><title>row {label}: {span.start_ms / 1000:.2f} to '
        f"{span.end_ms / 1000:.2f} s</title></rect>{text if width > 9 * len(label) else ''}"
    )
