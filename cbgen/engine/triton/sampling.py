"""Choosing tokens on CUDA: logits in, token ids out, nothing read by the host.

Meaning as in `cbgen.engine.operators.base`. Logits are float32, bfloat16 or float16, their rows contiguous. Two
launches, whose grids follow from shapes alone, so that CUDA graphs can hold them: the vocabulary of each row is cut
into parts, whose maxima one program finds each; then one program per row joins them and, if the row draws, draws.

A draw sorts nothing. A token's key is the bits of how far its logit is from the best one, over the temperature: an
integer, 0 for the likeliest, that grows as tokens get less likely. Each way of truncation keeps the tokens up to some
key, and of those with just that key the first few. That key is searched for by counting, or weighing, the tokens up to
several pivots at once; as soon as few enough tokens can be kept, they are collected and the search goes on among these.
Selection by pivots instead of sorting is the idea of FlashInfer's sampling kernels (arXiv 2501.01005); here it is exact
and no token is rejected, as a row's one random number has to decide.

Weights are float32, as are their sums over a tile while a key is searched for; all other sums are float64. A row's sums
have one order, whatever shares its batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_NUM_WARPS = 16  # of the program that draws
_MAX_REGISTERS = 128  # of a thread; unless told, the assembler takes fewer, for more programs at a time, and spills
_NUM_PIVOTS = 8
_NEAR_KEY = 0x41200000  # of 10: a token of 1 / 22,000 of the best one's probability


class TritonSampling:
    """The kernels.

    Args:
        part: tokens in a part of the vocabulary whose maximum one program finds.
        tile: tokens that a program which draws looks at in one go.
        max_candidates: tokens that are collected at most. With more left, the search goes over the whole row.
    """

    def __init__(self, part: int = 4096, tile: int = 1024, max_candidates: int = 4096) -> None:
        self._part = part
        self._tile = tile
        self._max_candidates = max_candidates

    def argmax(self, logits: Tensor) -> Tensor:
        """See `Operators.argmax`."""
        return self._choose(logits, None, None, None, None, None, -1)

    def draw(
        self, logits: Tensor, rows: Tensor, columns: tuple[Tensor, Tensor, Tensor, Tensor], uniforms: Tensor
    ) -> Tensor:
        """See `Operators.draw`; all of the parameters on the device.

        Args:
            logits: [S, V].
            rows: [R] int64.
            columns: temperature, top_k, top_p and min_p, all [R].
            uniforms: [R] float64.
        """
        return self._choose(logits, rows, columns, (uniforms, rows), None, None, 0)

    def sample(
        self,
        logits: Tensor,
        columns: tuple[Tensor, Tensor, Tensor, Tensor],
        random_state: Tensor,
        position: Tensor,
        stop_token_ids: Tensor | None,
        forbids_stops: Tensor | None,
        penalties: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> Tensor:
        """See `Operators.sample`; `columns` as in `draw`, `penalties` are the fields of `Penalties`."""
        random = random_state, position
        return self._choose(logits, None, columns, random, stop_token_ids, forbids_stops, -1, penalties)

    def _choose(
        self,
        logits: Tensor,
        rows: Tensor | None,
        columns: tuple[Tensor, Tensor, Tensor, Tensor] | None,
        random: tuple[Tensor, Tensor] | None,
        stop_token_ids: Tensor | None,
        forbids_stops: Tensor | None,
        unsound: int,
        penalties: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> Tensor:
        """`unsound` is what rows get whose logits are not sound."""
        num_rows, vocab_size, device = len(logits if rows is None else rows), logits.shape[1], logits.device
        token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
        if not num_rows:
            return token_ids
        stops, forbids = token_ids[:, None], token_ids  # what is not used is any tensor
        has_stops = stop_token_ids is not None and forbids_stops is not None
        if stop_token_ids is not None and forbids_stops is not None:
            stops, forbids = stop_token_ids, forbids_stops
        num_parts = -(-vocab_size // self._part)
        maxima = torch.empty((num_rows, num_parts, 2), dtype=torch.float32, device=device)
        places = torch.empty((num_rows, num_parts), dtype=torch.int32, device=device)
        factor, seen, seen_rows = penalties or (maxima, places, token_ids)
        inputs = (logits, token_ids if rows is None else rows, stops, forbids, factor, seen, seen_rows, maxima, places)
        strides = (logits.stride(0), stops.stride(0), seen.stride(0))
        flags = {"HAS_ROWS": rows is not None, "HAS_STOPS": has_stops, "HAS_PENALTIES": penalties is not None}
        _best_kernel[(num_rows, num_parts)](
            *inputs,
            *strides,
            vocab_size,
            stops.shape[1],
            **flags,
            PART=self._part,
            num_warps=8,
            maxnreg=_MAX_REGISTERS,
        )
        draws = columns is not None
        candidates = places
        if draws:
            candidates = torch.empty((2, num_rows, self._max_candidates), dtype=torch.int32, device=device)
        _choose_kernel[(num_rows,)](
            *inputs, *(columns or (maxima, places, maxima, maxima)), *(random or (token_ids, token_ids)), candidates,
            token_ids, *strides, vocab_size, stops.shape[1], num_parts, **flags, DRAWS=draws,
            HAS_POSITIONS=random is not None and random[0].dtype == torch.int64, UNSOUND=unsound,
            PARTS_PAD=triton.next_power_of_2(num_parts), TILE=self._tile, MAX_CANDIDATES=self._max_candidates,
            NEAR_KEY=_NEAR_KEY, NUM_PIVOTS=_NUM_PIVOTS, num_warps=_NUM_WARPS if draws else 1, maxnreg=_MAX_REGISTERS,
        )  # fmt: skip
        return token_ids


# -- the most likely token --------------------------------------------------------------------------------------------


@triton.jit
def _best_kernel(
    logits_ptr,  # [S, vocab_size]
    rows_ptr,  # [R] int64; not used without HAS_ROWS: row i is row i
    stop_ptr,  # [R, num_stops] int64; not used without HAS_STOPS
    forbids_ptr,  # [R] bool; the same
    factor_ptr,  # [R] float32; this one and the next two are not used without HAS_PENALTIES
    seen_ptr,  # [M, vocab_size / 32] int32
    seen_rows_ptr,  # [R] int64
    maxima_ptr,  # [R, num_parts, 2] float32: of all tokens, +inf where one is NaN; and of those that are allowed
    places_ptr,  # [R, num_parts] int32: the first token that has the latter
    logits_stride,
    stop_stride,
    seen_stride,
    vocab_size,
    num_stops,
    HAS_ROWS: tl.constexpr,
    HAS_STOPS: tl.constexpr,
    HAS_PENALTIES: tl.constexpr,
    PART: tl.constexpr,
):
    """Grid: (R, num_parts)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = part * PART + tl.arange(0, PART)
    logits_row = row
    if HAS_ROWS:
        logits_row = tl.load(rows_ptr + row)
    logits = _logits_at(logits_ptr + logits_row * logits_stride, columns, vocab_size)
    has_nan = tl.max((logits != logits).to(tl.int32), axis=0) > 0
    logits = tl.where(logits != logits, float("-inf"), logits)
    maximum = tl.where(has_nan, float("inf"), tl.max(logits, axis=0))
    if HAS_PENALTIES:
        seen_row_ptr = seen_ptr + tl.load(seen_rows_ptr + row) * seen_stride
        logits = _penalize(logits, columns, vocab_size, seen_row_ptr, tl.load(factor_ptr + row))
    if HAS_STOPS:
        num_forbidden = tl.where(tl.load(forbids_ptr + row), num_stops, 0)
        logits = _forbid(logits, columns, stop_ptr + row * stop_stride, num_forbidden)
    allowed = tl.max(logits, axis=0)
    place = row * tl.num_programs(1) + part
    tl.store(maxima_ptr + 2 * place, maximum)
    tl.store(maxima_ptr + 2 * place + 1, allowed)
    tl.store(places_ptr + place, tl.min(tl.where(logits == allowed, columns, 0x7FFFFFFF), axis=0))


@triton.jit
def _logits_at(row_ptr, columns, vocab_size):
    return tl.load(row_ptr + columns, mask=columns < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def _penalize(logits, columns, vocab_size, seen_row_ptr, factor):
    """`Penalties` of one row on some of its logits, float32."""
    if factor != 1:
        words = tl.load(seen_row_ptr + columns // 32, mask=columns < vocab_size, other=0)
        is_seen = ((words >> (columns % 32)) & 1) != 0
        changed = tl.where(logits > 0, tl.div_rn(logits, factor), logits * factor)
        logits = tl.where(is_seen, tl.minimum(changed, 3.4028234663852886e38), logits)  # the largest float32
    return logits


@triton.jit
def _forbid(logits, columns, stop_ptr, num_forbidden):
    for i in range(num_forbidden):
        logits = tl.where(columns == tl.load(stop_ptr + i), float("-inf"), logits)
    return logits


# -- the draw ---------------------------------------------------------------------------------------------------------


@triton.jit
def _choose_kernel(
    logits_ptr,
    rows_ptr,
    stop_ptr,
    forbids_ptr,
    factor_ptr,
    seen_ptr,
    seen_rows_ptr,
    maxima_ptr,
    places_ptr,  # all as in `_best_kernel`
    temperature_ptr,  # [R] float32; this one and those below are not used without DRAWS
    top_k_ptr,  # [R] int32
    top_p_ptr,  # [R] float32
    min_p_ptr,  # [R] float32
    random_ptr,  # [R] int64 states; float64 uniforms without HAS_POSITIONS
    position_ptr,  # [R] int64
    candidates_ptr,  # [2, R, MAX_CANDIDATES] int32, scratch
    token_ids_ptr,  # [R] int64
    logits_stride,
    stop_stride,
    seen_stride,
    vocab_size,
    num_stops,
    num_parts,
    HAS_ROWS: tl.constexpr,
    HAS_STOPS: tl.constexpr,
    HAS_PENALTIES: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    DRAWS: tl.constexpr,
    UNSOUND: tl.constexpr,
    PARTS_PAD: tl.constexpr,  # a power of two
    TILE: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
    NEAR_KEY: tl.constexpr,
    NUM_PIVOTS: tl.constexpr,
):
    """Grid: (R,). Rows that do not draw leave before they look at their logits."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS_PAD)
    maxima_ptrs = maxima_ptr + 2 * (row * num_parts + parts)
    maximum = tl.max(tl.load(maxima_ptrs, mask=parts < num_parts, other=float("-inf")), axis=0)
    allowed = tl.load(maxima_ptrs + 1, mask=parts < num_parts, other=float("-inf"))
    best = tl.max(allowed, axis=0)
    places = tl.load(places_ptr + row * num_parts + parts, mask=parts < num_parts, other=0x7FFFFFFF)
    token = tl.min(tl.where(allowed == best, places, 0x7FFFFFFF), axis=0)
    token = tl.where(best > float("-inf"), token, 0)  # the first where all is forbidden
    is_sound = (maximum < float("inf")) & (maximum > float("-inf"))
    if DRAWS:
        temperature = tl.load(temperature_ptr + row)
        if (temperature > 0) & is_sound & (best > float("-inf")):
            logits_row = row
            num_forbidden, factor, seen_row = num_stops * 0, temperature * 0 + 1, row * 0
            if HAS_ROWS:
                logits_row = tl.load(rows_ptr + row)
            if HAS_STOPS:
                num_forbidden = tl.where(tl.load(forbids_ptr + row), num_stops, 0)
            if HAS_PENALTIES:
                factor, seen_row = tl.load(factor_ptr + row), tl.load(seen_rows_ptr + row)
            keys_ptr = candidates_ptr + row * MAX_CANDIDATES
            items = (
                logits_ptr + logits_row * logits_stride, vocab_size, stop_ptr + row * stop_stride, num_forbidden, best,
                temperature, keys_ptr, seen_ptr + seen_row * seen_stride, factor,
            )  # fmt: skip
            token = _draw(
                items, vocab_size, tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row),
                _uniform(random_ptr + row, position_ptr + row, HAS_POSITIONS),
                keys_ptr + tl.num_programs(0).to(tl.int64) * MAX_CANDIDATES, TILE, MAX_CANDIDATES, NEAR_KEY, NUM_PIVOTS,
            )  # fmt: skip
    tl.store(token_ids_ptr + row, tl.where(is_sound, token, UNSOUND).to(tl.int64))


@triton.jit
def _uniform(random_ptr, position_ptr, HAS_POSITIONS: tl.constexpr):
    """Float64 in [0, 1): `cbgen.engine.sampling_input.uniforms` from the state before the last word, by SplitMix64."""
    number = tl.load(random_ptr)
    if HAS_POSITIONS:
        state = number.to(tl.uint64, bitcast=True) + tl.load(position_ptr).to(tl.uint64, bitcast=True)
        state += 0x9E3779B97F4A7C15
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB
        state = state ^ (state >> 31)
        number = (state >> 11).to(tl.int64, bitcast=True).to(tl.float64) * 1.1102230246251565e-16  # 2^-53
    return number


@triton.jit
def _draw(
    items,  # see `_keys_at`
    vocab_size,
    top_k,
    top_p,
    min_p,
    uniform,
    ids_ptr,  # [MAX_CANDIDATES] int32, scratch
    TILE: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
    NEAR_KEY: tl.constexpr,
    NUM_PIVOTS: tl.constexpr,
):
    """The token that `uniform` falls on among those that truncation keeps."""
    by_k, by_p, by_min_p = (top_k > 0) & (top_k < vocab_size), top_p < 1, min_p > 0
    log_min_p = tl.log(tl.where(by_min_p, min_p, 1.0).to(tl.float64)).to(tl.float32)
    high = tl.where(by_min_p, _key_of(tl.minimum(log_min_p, 0.0)), 0x7F800000)  # the last key that may be kept: all
    room = high * 0 + vocab_size  # how many tokens of that key are kept
    num_candidates = high * 0  # 0 until they are collected
    if by_k | by_p | by_min_p:
        # Mostly the tokens at most this far from the best one are few, and enough.
        near = tl.minimum(high, NEAR_KEY)
        taken, mass, count, total = _collect(items, vocab_size, near, high, ids_ptr, TILE, MAX_CANDIDATES)
        wanted = tl.where(by_k, tl.minimum(top_k, count).to(tl.float64), _nucleus(top_p, total))
        low = high * 0 - 1
        if ((near == high) | (tl.where(by_k, taken.to(tl.float64), mass) >= wanted)) & (taken <= MAX_CANDIDATES):
            high, count, num_candidates = near, taken, taken
        else:
            if by_k | by_p:
                low, high, count = _search(
                    items, num_candidates, vocab_size, low, high, count, wanted, by_k, MAX_CANDIDATES, TILE, NUM_PIVOTS
                )
            if count <= MAX_CANDIDATES:
                num_candidates, mass, count, total = _collect(
                    items, vocab_size, high, high, ids_ptr, TILE, MAX_CANDIDATES
                )
        if by_k | by_p:
            low, high, count = _search(
                items, num_candidates, vocab_size, low, high, count, wanted, by_k, 0, TILE, NUM_PIVOTS
            )
            below, ties, mass_below = _below(items, num_candidates, vocab_size, high, TILE)
            room = tl.where(by_k, wanted.to(tl.int32) - below, _room(wanted, mass_below, high, ties))
            if by_k & by_p:
                last, last_room = high, room
                wanted = _nucleus(top_p, mass_below + room * _weight_of(high).to(tl.float64))
                low, high, count = _search(
                    items,
                    num_candidates,
                    vocab_size,
                    high * 0 - 1,
                    high,
                    count,
                    wanted,
                    by_k & False,
                    0,
                    TILE,
                    NUM_PIVOTS,
                )
                below, ties, mass_below = _below(items, num_candidates, vocab_size, high, TILE)
                room = _room(wanted, mass_below, high, tl.where(high == last, last_room, ties))
    item = _invert(items, num_candidates, vocab_size, high, room, uniform, TILE)
    if num_candidates > 0:
        item = tl.load(ids_ptr + item)
    return item


@triton.jit
def _key_of(scaled):
    """Of logits that are 0 for the likeliest and less for others: integers, the smaller the likelier."""
    return scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _weight_of(keys):
    return tl.exp(-keys.to(tl.float32, bitcast=True))


@triton.jit
def _keys_at(items, num_candidates, places):
    """Keys of the candidates at these places if there are some, else of the tokens; that of -inf past their end."""
    row_ptr, vocab_size, stop_ptr, num_forbidden, best, temperature, keys_ptr, seen_row_ptr, factor = items
    if num_candidates > 0:
        keys = tl.load(keys_ptr + places, mask=places < num_candidates, other=0x7F800000)
    else:
        logits = _penalize(_logits_at(row_ptr, places, vocab_size), places, vocab_size, seen_row_ptr, factor)
        logits = _forbid(logits, places, stop_ptr, num_forbidden)
        keys = _key_of(tl.div_rn(logits - best, temperature))
    return keys


@triton.jit
def _measure(items, num_candidates, vocab_size, pivots, TILE: tl.constexpr):
    """How many tokens have keys up to each pivot, int32, and their weight, float64 but for sums over a tile."""
    counts = pivots * 0
    masses = counts.to(tl.float64)
    num_items = tl.where(num_candidates > 0, num_candidates, vocab_size)
    for start in range(0, num_items, TILE):
        keys = _keys_at(items, num_candidates, start + tl.arange(0, TILE))
        is_kept = keys[None, :] <= pivots[:, None]
        counts += tl.sum(is_kept.to(tl.int32), axis=1)
        masses += tl.sum(tl.where(is_kept, _weight_of(keys)[None, :], 0.0), axis=1).to(tl.float64)
    return counts, masses


@triton.jit
def _nucleus(top_p, total):
    """The mass that the nucleus has to reach; never 0, so that it holds a token."""
    return tl.maximum(top_p.to(tl.float64) * total, 1e-30)


@triton.jit
def _search(
    items,
    num_candidates,
    vocab_size,
    low,
    high,
    count,
    wanted,
    by_count,
    MAX_COUNT: tl.constexpr,
    TILE: tl.constexpr,
    NUM_PIVOTS: tl.constexpr,
):
    """Keys up to `high` are enough, those up to `low` are not; `count` tokens have keys up to `high`. Narrow this until
    `high` is the smallest key that is enough, or has no more than MAX_COUNT tokens up to it."""
    numbers = tl.arange(0, NUM_PIVOTS)
    while (high - low > 1) & (count > MAX_COUNT):
        steps = (high - low).to(tl.int64) * (numbers + 1) // (NUM_PIVOTS + 1)
        pivots = low + steps.to(tl.int32)
        if (low < 0) & (high > 126 << 23):  # at first 1/2, 1, 2, 4 ... below the best logit: one of these octaves it is
            pivots = tl.minimum((126 + numbers) << 23, high - 1)
        counts, masses = _measure(items, num_candidates, vocab_size, pivots, TILE)
        is_enough = tl.where(by_count, counts.to(tl.float64), masses) >= wanted
        count = tl.minimum(count, tl.min(tl.where(is_enough, counts, count), axis=0))
        low = tl.maximum(low, tl.max(tl.where(is_enough, low, pivots), axis=0))
        high = tl.minimum(high, tl.min(tl.where(is_enough, pivots, high), axis=0))
    return low, high, count


@triton.jit
def _collect(items, vocab_size, near, high, ids_ptr, TILE: tl.constexpr, MAX_CANDIDATES: tl.constexpr):
    """Write keys and ids of the tokens with keys up to `near`, by id, as far as there is room.

    Returns how many tokens these are and their weight, then the same of the tokens with keys up to `high`.
    """
    keys_ptr = items[6]
    taken = high * 0
    # One sum per place in the tile: to add them up at each tile would make all threads wait for each other.
    counts = tl.zeros([TILE], tl.int32)
    masses, totals = tl.zeros([TILE], tl.float64), tl.zeros([TILE], tl.float64)
    for start in range(0, vocab_size, TILE):
        columns = start + tl.arange(0, TILE)
        keys = _keys_at(items, high * 0, columns)
        weights = tl.where(keys <= high, _weight_of(keys), 0.0).to(tl.float64)
        is_taken = ((keys <= near) & (columns < vocab_size)).to(tl.int32)
        counts += ((keys <= high) & (columns < vocab_size)).to(tl.int32)
        masses += tl.where(is_taken > 0, weights, 0.0)
        totals += weights
        taken_here = tl.sum(is_taken, axis=0)
        if taken_here > 0:
            places = taken + tl.cumsum(is_taken, axis=0) - 1
            has_room = (is_taken > 0) & (places < MAX_CANDIDATES)
            tl.store(keys_ptr + places, keys, mask=has_room)
            tl.store(ids_ptr + places, columns, mask=has_room)
        taken += taken_here
    tl.debug_barrier()  # what some threads wrote, others will read
    return taken, tl.sum(masses, axis=0), tl.sum(counts, axis=0), tl.sum(totals, axis=0)


@triton.jit
def _below(items, num_candidates, vocab_size, key, TILE: tl.constexpr):
    """How many tokens have smaller keys, how many this one, and the weight of the former."""
    below, ties = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32)
    masses = tl.zeros([TILE], tl.float64)  # one sum per place in the tile, as in `_collect`
    num_items = tl.where(num_candidates > 0, num_candidates, vocab_size)
    for start in range(0, num_items, TILE):
        keys = _keys_at(items, num_candidates, start + tl.arange(0, TILE))
        below += (keys < key).to(tl.int32)
        ties += (keys == key).to(tl.int32)
        masses += tl.where(keys < key, _weight_of(keys), 0.0).to(tl.float64)
    return tl.sum(below, axis=0), tl.sum(ties, axis=0), tl.sum(masses, axis=0)


@triton.jit
def _room(wanted, mass_below, key, ties):
    """How many of the tokens of this key reach the wanted mass together with those below: from 1 to `ties`."""
    weight = tl.maximum(_weight_of(key).to(tl.float64), 1e-300)
    room = tl.minimum(tl.maximum((wanted - mass_below) / weight, 0.0), ties.to(tl.float64)).to(tl.int32)
    room = tl.where(mass_below + room * weight < wanted, room + 1, room)
    return tl.minimum(tl.maximum(room, 1), ties)


@triton.jit
def _invert(items, num_candidates, vocab_size, high, room, uniform, TILE: tl.constexpr):
    """The place of the first kept token at which the cumulative weight passes `uniform` times the whole."""
    _, ties, total = _below(items, num_candidates, vocab_size, high, TILE)
    total += tl.minimum(room, ties) * _weight_of(high).to(tl.float64)
    before_total = (total.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)  # the next smaller number
    target = tl.minimum(uniform * total, before_total)  # never past the end
    num_items = tl.where(num_candidates > 0, num_candidates, vocab_size)
    start, num_ties = high * 0, high * 0
    last = tl.zeros([TILE], tl.int32)
    found = high * 0 + 0x7FFFFFFF
    cumulative = total * 0
    while (start < num_items) & (found == 0x7FFFFFFF):
        places = start + tl.arange(0, TILE)
        keys = _keys_at(items, num_candidates, places)
        is_tie = (keys == high).to(tl.int32)
        num_ties += tl.sum(is_tie, axis=0)
        is_kept = keys <= high
        if num_ties > room:  # of these only the first, in the order of ids
            rank = num_ties - tl.sum(is_tie, axis=0) + tl.cumsum(is_tie, axis=0)
            is_kept = (keys < high) | ((is_tie > 0) & (rank <= room))
        weights = tl.where(is_kept, _weight_of(keys), 0.0).to(tl.float64)
        last = tl.where(weights > 0, places, last)
        mass = tl.sum(weights, axis=0)
        if cumulative + mass > target:  # it is in this tile
            is_past = (cumulative + tl.cumsum(weights, axis=0) > target) & (weights > 0)
            found = tl.min(tl.where(is_past, places, 0x7FFFFFFF), axis=0)
        cumulative += mass
        start += TILE
    # None is found where the sums of the tiles have been rounded up.
    return tl.where(found == 0x7FFFFFFF, tl.max(last, axis=0), found)
