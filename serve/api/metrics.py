"""What the server counts, for Prometheus: vLLM's names behind `jaxmask:`, and what only masks have.

Nothing is global: each application has metrics of its own. Counting happens once for each output that is delivered, on
the event loop; families are made when somebody asks.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Iterable, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from serve.api.errors import error_type
from serve.api.histogram import Histogram
from serve.async_engine import AsyncEngine
from serve.compilation import compiled_so_far
from serve.outputs import CompletionOutput, RequestMetrics, RequestOutput

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_POWERS = tuple(2**power for power in range(18))
_HISTOGRAMS: Mapping[str, tuple[str, tuple[float | int, ...]]] = {
    "time_to_first_token_seconds": ("From arrival to the first token.", _SECONDS),
    "inter_token_latency_seconds": ("Between tokens of a completion: a request's mean, once for each token.", _SECONDS),
    "request_time_per_output_token_seconds": ("The same, once for each request.", _SECONDS),
    "e2e_request_latency_seconds": ("From arrival to the end.", _SECONDS),
    "request_queue_time_seconds": ("From arrival to a slot.", _SECONDS),
    "request_prefill_time_seconds": ("From a slot to the first token.", _SECONDS),
    "request_decode_time_seconds": ("From the first token to the last.", _SECONDS),
    "request_prompt_tokens": ("Tokens of a prompt.", _TOKENS),
    "request_generation_tokens": ("Tokens of all completions of a request.", _TOKENS),
    "request_params_n": ("Completions of a request.", (1, 2, 5, 10, 20, 50, 100)),
    "sampling_mask_support_size": ("Ids in the support of a token.", _POWERS),
}


@dataclasses.dataclass
class _Progress:
    """What came of a request so far."""

    num_tokens: int = 0
    num_completions: int = 0


class Metrics(Collector):
    """Counts what a server does; an `Observer` of its engine.

    Attributes:
      media_type: of `text`.
    """

    media_type = CONTENT_TYPE_LATEST

    def __init__(self, engine: AsyncEngine, model_name: str):
        """Nothing was counted yet; nobody tells it anything either, unless it is made the engine's observer."""
        self._engine, self._model_name = engine, model_name
        self._histograms = {name: Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self._totals: collections.Counter[str] = collections.Counter()
        self._ends: collections.Counter[str] = collections.Counter(stop=0, length=0, abort=0, error=0)
        self._refused: collections.Counter[str] = collections.Counter()
        self._going: dict[str, _Progress] = {}
        self._compiled_before = compiled_so_far()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def answered(self, status: int) -> None:
        """A response begins."""
        self._totals["http_responses"] += 1
        if status >= 400:
            self._refused[error_type(status)] += 1

    def failed(self, request_id: str) -> None:
        """See `Observer`."""
        self._going.pop(request_id, None)
        self._totals["request_failures"] += 1

    def delivered(self, output: RequestOutput) -> None:
        """See `Observer`."""
        progress = self._going.pop(output.request_id, None) or _Progress()
        for completion in output.outputs:
            self._count(completion, progress)
        if output.finished:
            self._end(output, progress)
        else:
            self._going[output.request_id] = progress

    def collect(self) -> Iterable[Metric]:
        """The families of all metrics, as they are now."""
        yield from self._gauges()
        yield from self._counters()
        for name, (text, _) in _HISTOGRAMS.items():
            family = HistogramMetricFamily(f"jaxmask:{name}", text, labels=["model_name"])
            histogram = self._histograms[name]
            family.add_metric([self._model_name], histogram.buckets, histogram.total)
            yield family

    def _count(self, completion: CompletionOutput, progress: _Progress) -> None:
        num_tokens = len(completion.token_ids)
        progress.num_tokens += num_tokens
        self._totals["generation_tokens"] += num_tokens
        if completion.sampling_mask is not None and num_tokens:
            counts = completion.sampling_mask.counts
            self._totals["sampling_mask_ids"] += int(counts.sum())
            self._histograms["sampling_mask_support_size"].add_all(counts)
        if completion.finish_reason is not None:
            progress.num_completions += 1
            self._ends[completion.finish_reason] += 1

    def _end(self, output: RequestOutput, progress: _Progress) -> None:
        num_prompt_tokens = len(output.prompt_token_ids)
        self._totals["prompt_tokens"] += num_prompt_tokens
        self._histograms["request_prompt_tokens"].add(num_prompt_tokens)
        self._histograms["request_generation_tokens"].add(progress.num_tokens)
        self._histograms["request_params_n"].add(progress.num_completions)
        if output.metrics is not None:
            self._time(output.metrics, progress)

    def _time(self, times: RequestMetrics, progress: _Progress) -> None:
        histograms = self._histograms
        histograms["e2e_request_latency_seconds"].add(time.monotonic() - times.arrival_time)
        if times.first_scheduled_time is None:
            return
        histograms["request_queue_time_seconds"].add(times.first_scheduled_time - times.arrival_time)
        if times.first_token_time is None or times.last_token_time is None:
            return
        histograms["time_to_first_token_seconds"].add(times.first_token_time - times.arrival_time)
        histograms["request_prefill_time_seconds"].add(times.first_token_time - times.first_scheduled_time)
        seconds = times.last_token_time - times.first_token_time
        histograms["request_decode_time_seconds"].add(seconds)
        num_between = progress.num_tokens - progress.num_completions
        if num_between > 0:
            mean = seconds * progress.num_completions / num_between
            histograms["inter_token_latency_seconds"].add(mean, num_between)
            histograms["request_time_per_output_token_seconds"].add(mean)

    def _gauges(self) -> Iterable[Metric]:
        engine = self._engine.engine
        num_running = min(max(engine.num_running, 0), self._engine.num_open)
        values = {
            "num_requests_running": ("Completions that have a slot.", num_running),
            "num_requests_waiting": ("Completions that wait for one.", self._engine.num_open - num_running),
            "kv_cache_usage_perc": ("Share of the slots' room that is used; 1 is all.", engine.capacity_share),
        }
        for name, (text, value) in values.items():
            yield self._family(GaugeMetricFamily, name, text, {"": value})
        weights = {engine.weight_version: 1}
        yield self._family(GaugeMetricFamily, "weight_info", "The name of the weights.", weights, "weight_version")
        gate: dict[str, int] = {self._engine.gate.state: 1}
        yield self._family(GaugeMetricFamily, "gate_info", "Whether requests are taken.", gate, "state")

    def _counters(self) -> Iterable[Metric]:
        counters = self._engine.engine.counters
        num_compiled = (compiled_so_far() - self._compiled_before).num_programs
        values = {
            "prefix_cache_queries": ("Tokens of prompts that were looked for.", counters.num_prefix_queries),
            "prefix_cache_hits": ("Those of them that were found.", counters.num_prefix_hits),
            "num_preemptions": ("Completions that lost their slot: none ever do.", 0),
            "prompt_tokens": ("Tokens of prompts that were answered.", self._totals["prompt_tokens"]),
            "generation_tokens": ("Tokens that were delivered.", self._totals["generation_tokens"]),
            "sampling_mask_ids": ("Ids in supports that were delivered.", self._totals["sampling_mask_ids"]),
            "request_failures": ("Requests that the engine failed to answer.", self._totals["request_failures"]),
            "http_responses": ("Responses that were begun.", self._totals["http_responses"]),
            "compiled_programs": ("Programs compiled since the start.", num_compiled),
        }
        for name, (text, value) in values.items():
            yield self._family(CounterMetricFamily, name, text, {"": value})
        ends, refused = "Completions that ended.", "Responses that were errors."
        yield self._family(CounterMetricFamily, "request_success", ends, self._ends, "finished_reason")
        yield self._family(CounterMetricFamily, "requests_refused", refused, self._refused, "reason")

    def _family(
        self,
        kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
        name: str,
        text: str,
        values: Mapping[str, float | int],
        label: str | None = None,
    ) -> Metric:
        """A family of one value for each value of a label; of the one value of "" without a label."""
        family = kind(f"jaxmask:{name}", text, labels=["model_name"] + ([] if label is None else [label]))
        for value_of_label, value in values.items():
            family.add_metric([self._model_name] + ([] if label is None else [value_of_label]), value)
        return family
