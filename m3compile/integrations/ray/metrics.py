"""What a replica counts; Ray exports it as Prometheus text on every node, see docs/serving.md."""

from __future__ import annotations

from ray.serve.metrics import Counter, Gauge, Histogram

_MS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000]
_TOKENS = [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536]
_REQUESTS = [1, 2, 4, 8, 16, 32, 64, 128]

# Counters of `Encoder.counts` that are exported, with what they count.
_ENCODER_COUNTS = {
    "items": "Images and clips that were encoded.",
    "replays": "Runs of a captured budget; on the CPU, of a budget's size.",
    "exact_runs": "Runs at their exact shape, uncaptured.",
    "real_tokens": "Output tokens that were asked for.",
    "padded_tokens": "Output tokens of padding that were computed beside them.",
    "nonfinite_items": "Images and clips with a non-finite pixel.",
}


class ReplicaMetrics:
    """The metrics of one replica; Serve adds its name to each. Made inside the replica."""

    def __init__(self) -> None:
        self._requests = Counter(
            "m3compile_requests", "Requests by outcome, an HTTP status.", ("status",)
        )
        self._queue_depth = Gauge("m3compile_queue_depth", "Requests held, not yet answered.")
        self._request_ms = Histogram(
            "m3compile_request_ms", "From a request's arrival to its answer.", boundaries=_MS
        )
        self._batch_tokens = Histogram(
            "m3compile_batch_tokens", "Output tokens encoded together.", boundaries=_TOKENS
        )
        self._batch_requests = Histogram(
            "m3compile_batch_requests", "Requests encoded together.", boundaries=_REQUESTS
        )
        self._encode_ms = Histogram(
            "m3compile_encode_ms",
            "Replays of a batch, with its copies to and from the device.",
            boundaries=_MS,
        )
        self._counters = {
            name: Counter(f"m3compile_{name}", text) for name, text in _ENCODER_COUNTS.items()
        }
        self._seen = dict.fromkeys(_ENCODER_COUNTS, 0)

    def queue(self, depth: int) -> None:
        self._queue_depth.set(depth)

    def answered(self, status: int, seconds: float) -> None:
        self._requests.inc(tags={"status": str(status)})
        self._request_ms.observe(1000 * seconds)

    def encoded(self, tokens: int, requests: int, seconds: float, counts: dict[str, int]) -> None:
        """A batch was encoded; `counts` is what `Encoder.counts` says after it."""
        self._batch_tokens.observe(tokens)
        self._batch_requests.observe(requests)
        self._encode_ms.observe(1000 * seconds)
        for name, counter in self._counters.items():
            # Batches that end together may be told of in the other order.
            if (grown := counts[name] - self._seen[name]) > 0:
                counter.inc(grown)
                self._seen[name] = counts[name]
