"""One batch through our encoder and its peers: times, floor and correctness."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from m3compile.bench.cases import Case
from m3compile.bench.clock import Clock
from m3compile.bench.floor import count_work, floor_of
from m3compile.bench.judge import Expected, Judge
from m3compile.bench.records import CaseResult, Ceilings, PeerResult
from m3compile.bench.runners import EncoderRunner, Runner, segments_of_items


class Bench:
    """What every case is measured with.

    Args:
        ours: the encoder.
        peers: other runners with the same weights.
        pixel_values: random rows on the device, at least as many as the largest case has.
    """

    def __init__(
        self,
        ours: EncoderRunner,
        peers: Sequence[Runner],
        pixel_values: Tensor,
        clock: Clock,
        judge: Judge,
        ceilings: Ceilings,
    ) -> None:
        self._ours = ours
        self._peers = peers
        self._pixel_values = pixel_values
        self._clock = clock
        self._judge = judge
        self._ceilings = ceilings

    def measure(self, case: Case) -> CaseResult:
        """Time a case and check its results."""
        grids = list(case.grids)
        pixels = self._pixel_values[: 4 * case.tokens]
        expected = self._judge.expect(pixels, grids)
        encoder = self._ours.encoder
        prepared = self._ours.prepare(pixels, grids, case.budget)
        assert prepared is not None, f"{case.name} does not fit its bucket"
        replay = self._clock.on_device(prepared[0])

        def call() -> list[Tensor]:
            if case.kind == "padded":
                return encoder.encode_at(pixels, grids, case.budget)
            return encoder.encode(pixels, grids)

        before = encoder.stats()
        check = self._judge.check(call(), expected)
        route = _route(before, encoder.stats())
        end_to_end = self._clock.end_to_end(call)
        config, ceilings = encoder.manifest.tower, self._ceilings
        segments = segments_of_items(grids, config.vision_segment_max_frames)
        patches = [math.prod(segment) for segment in segments]
        work = count_work(config, patches, self._pixel_values.element_size())
        floor = floor_of(work, ceilings.flops_per_s, ceilings.bytes_per_s)
        return CaseResult(
            name=case.name,
            kind=case.kind,
            grids=case.grids,
            tokens=case.tokens,
            budget=case.budget,
            padding=1 - case.tokens / case.budget,
            worst_padding=case.worst_padding,
            floor=floor,
            replay=replay,
            end_to_end=end_to_end,
            route=route,
            share_of_floor=floor.ms / replay.median_ms,
            check=check,
            peers=tuple(self._peer_results(case, pixels, expected)),
        )

    def _peer_results(self, case: Case, pixels: Tensor, expected: Expected) -> list[PeerResult]:
        grids = list(case.grids)
        is_forced = case.kind == "padded"
        found = []
        for peer in self._peers:
            prepared = peer.prepare(pixels, grids, case.budget if is_forced else None)
            if prepared is None:
                continue
            work, bucket = prepared
            device = self._clock.on_device(work)
            end_to_end = None
            if not is_forced:
                end_to_end = self._clock.end_to_end(lambda peer=peer: peer.encode(pixels, grids))  # type: ignore[misc]
            found.append(
                PeerResult(
                    name=peer.name,
                    bucket=bucket,
                    device=device,
                    end_to_end=end_to_end,
                    error=self._judge.check(peer.encode(pixels, grids), expected).error,
                )
            )
        return found


def _route(before: dict[str, int], after: dict[str, int]) -> str:
    replays, exact = (after[key] - before[key] for key in ("replays", "exact_runs"))
    if replays + exact != 1:
        return f"{replays + exact} runs"
    return "replay" if replays else "exact"
