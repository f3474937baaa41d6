"""A serving plan: which replicas read prompts and which generate, at what widths and batches, for targets of latency.

Prefill and decode run on pools of their own (disaggregated), the cache moves from one to the other, and neither waits for the
other. A pool consists of replicas, one copy of the model each; `plan.serving_memory` says what a device holds, `plan.serving_time`
how long a pass takes. Requests arrive evenly: bursts wait longer than the plan says. Images count as tokens of text.

Published for the 300B on H800, in nodes of eight, with 4-bit weights, 8-bit activations and prefill apart from decode: 56,000
input and 21,000 output tokens/s a node (Baidu's introduction of ERNIE 4.5; the shape of 2,000 tokens in, 400 out and 50 ms a token
is not confirmed). `tests/plan/test_serving.py` holds the plan against it, and against the least devices that FastDeploy names for
each width (its documentation: 80 GB cards for the 300B: 8 with 8 bits, 4 with 4, 2 with 2).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ernie_jax.config.model import ModelConfig
from ernie_jax.config.nearest import did_you_mean
from ernie_jax.config.presets import preset
from ernie_jax.plan.serving_memory import KV_BITS, WEIGHT_BITS, Replica
from ernie_jax.plan.serving_pool import Request, ServingPool, make_pool, shapes
from ernie_jax.plan.topologies import machine_named
from ernie_jax.plan.topology import Topology

ACTIVATIONS = ("bfloat16", "fp8")
# Wider weights win where narrower ones gain less than this.
_TIE = 0.01


@dataclass(frozen=True, kw_only=True)
class ServingPlan:
    """What serves a kind of request best, and what else was considered.

    Attributes:
      model: its name.
      topology: the machine.
      request: what was asked.
      wanted_per_s: requests/s asked for; None to use the whole topology.
      prefill, decode: the pools chosen; None where nothing meets the targets.
      prefill_replicas, decode_replicas: of each.
      requests_per_s: that they serve together.
      reason: why nothing fits, or what the choice is short of; empty otherwise.
      considered: every pool, chosen or not, each with the reason why not.
    """

    model: str
    topology: Topology
    request: Request
    wanted_per_s: float | None
    prefill: ServingPool | None
    decode: ServingPool | None
    prefill_replicas: int
    decode_replicas: int
    requests_per_s: float
    reason: str
    considered: tuple[ServingPool, ...]

    @property
    def fits(self) -> bool:
        """Targets met, and the requests asked for served, within the topology."""
        return not self.reason

    @property
    def devices(self) -> int:
        """Devices of both pools."""
        pairs = ((self.prefill, self.prefill_replicas), (self.decode, self.decode_replicas))
        return sum(pool.replica.devices * count for pool, count in pairs if pool is not None)

    @property
    def decode_devices_per_prefill_device(self) -> float | None:
        """The ratio in which the mix of requests keeps both pools busy."""
        if self.prefill is None or self.decode is None:
            return None
        reading = self.request.prompt_tokens / self.prefill.tokens_per_s_per_device
        return self.request.output_tokens / self.decode.tokens_per_s_per_device / reading

    def alternatives(self, role: str, most: int = 8) -> tuple[ServingPool, ...]:
        """Runners-up of a role: the best pool of each shape and of each pair of widths, those that fit first."""
        best: dict[tuple[int, ...], ServingPool] = {}
        chosen = self.prefill if role == "prefill" else self.decode
        for pool in self.considered:
            if pool.role == role and (chosen is None or pool.replica != chosen.replica):
                cut = pool.replica
                keys: list[tuple[int, ...]] = [(cut.weight_bits, cut.kv_bits, 0)]
                if chosen is None or cut.kv_bits == chosen.replica.kv_bits:
                    keys.append((cut.tensor, cut.expert))
                for key in keys:
                    if key not in best or _order(pool) < _order(best[key]):
                        best[key] = pool
        return tuple(sorted({pool.replica: pool for pool in best.values()}.values(), key=_order)[:most])

    def to_json(self) -> dict[str, Any]:
        """Plain values, as `launch/plan.py --serve --json` prints them."""
        pools = {"prefill": (self.prefill, self.prefill_replicas), "decode": (self.decode, self.decode_replicas)}
        return {
            "model": self.model,
            "topology": self.topology.name,
            "request": {**vars(self.request), "requests_per_s": self.wanted_per_s},
            "fits": self.fits,
            "reason": self.reason,
            **{role: None if pool is None else {**pool.to_json(), "replicas": count} for role, (pool, count) in pools.items()},
            "devices": self.devices,
            "decode_devices_per_prefill_device": self.decode_devices_per_prefill_device,
            "requests_per_s": self.requests_per_s,
            "input_tokens_per_s": self.requests_per_s * self.request.prompt_tokens,
            "output_tokens_per_s": self.requests_per_s * self.request.output_tokens,
            "alternatives": {role: [pool.to_json() for pool in self.alternatives(role)] for role in pools},
        }


def plan_serving(
    model: str | ModelConfig,
    topology: str | Topology,
    *,
    prompt_tokens: int,
    output_tokens: int,
    time_to_first_token_s: float,
    time_per_token_s: float,
    weight_bits: Sequence[int] = WEIGHT_BITS,
    kv_bits: Sequence[int] = (16, 8),
    activations: str = "bfloat16",
    requests_per_s: float | None = None,
) -> ServingPlan:
    """Pools of prefill and decode for a kind of request.

    Every shape (tensor x expert devices a replica), width of weights and width of the cache is taken at the largest batch that
    memory and target allow. Both pools have caches of one width, for one hands them to the other. Of all pairs that one wins
    which serves the requests asked for on the fewest devices, or the most requests on the whole topology; within 1% the wider
    weights. Narrow weights cost quality, which a plan does not see: offer only widths that are good enough.

    Args:
      model: a preset's name, or a shape.
      topology: a name of the catalogue such as "h800:16", the path of a YAML file, or a machine.
      prompt_tokens, output_tokens: of a request.
      time_to_first_token_s: target from arrival to the first token, waiting for the batch before included.
      time_per_token_s: target between two tokens.
      weight_bits: widths to consider, of `serving_memory.WEIGHT_BITS`.
      kv_bits: widths of the cache, of `serving_memory.KV_BITS`.
      activations: "fp8" multiplies 8-bit operands where weights have 8 bits or fewer, and sends 8-bit rows; "bfloat16" does not.
      requests_per_s: to serve; None fills the topology.

    Raises:
      ValueError: an unknown model, topology, width or activation; counts below 1, targets of 0 or less, prompt and answer beyond
        the model's positions.
    """
    name = model if isinstance(model, str) else "custom"
    shape = preset(model) if isinstance(model, str) else model
    machine = machine_named(topology)
    request = _checked_request(shape, prompt_tokens, output_tokens, time_to_first_token_s, time_per_token_s)
    _check_widths("weight_bits", weight_bits, WEIGHT_BITS)
    _check_widths("kv_bits", kv_bits, KV_BITS)
    if activations not in ACTIVATIONS:
        known = f"{did_you_mean(str(activations), ACTIVATIONS)}; expected one of {', '.join(ACTIVATIONS)}"
        raise ValueError(f"activations={activations!r}{known}")
    if requests_per_s is not None:
        _positive("requests_per_s", requests_per_s)
    considered = [
        make_pool(shape, machine, role, Replica(tensor=t, expert=x, weight_bits=w, kv_bits=k, activations=activations), request)
        for (t, x), w, k, role in itertools.product(shapes(shape, machine), weight_bits, kv_bits, ("prefill", "decode"))
    ]
    return _choose(name, machine, request, requests_per_s, considered)


def _choose(name: str, topology: Topology, request: Request, wanted: float | None, considered: list[ServingPool]) -> ServingPlan:
    best: tuple[tuple[float, ...], ServingPool, ServingPool, int, int] | None = None
    for prefill, decode in _pairs(considered):
        counts = _replicas(topology.devices, request, wanted, prefill, decode)
        devices = counts[0] * prefill.replica.devices + counts[1] * decode.replica.devices
        served = _served(request, prefill, decode, *counts)
        bits = prefill.replica.weight_bits + decode.replica.weight_bits + prefill.replica.kv_bits
        score: tuple[float, ...]
        if wanted is None:
            # In steps of the tie; then fewer devices, then wider weights.
            score = (float(devices > topology.devices), -_step(served), devices, -bits)
        else:
            score = (float(devices > topology.devices), devices, -bits, -served)
        if best is None or score < best[0]:
            best = score, prefill, decode, *counts
    plan = ServingPlan(
        model=name,
        topology=topology,
        request=request,
        wanted_per_s=wanted,
        prefill=None if best is None else best[1],
        decode=None if best is None else best[2],
        prefill_replicas=0 if best is None else best[3],
        decode_replicas=0 if best is None else best[4],
        requests_per_s=0.0 if best is None else _served(request, *best[1:]),
        reason="",
        considered=(),
    )
    explained = tuple(_explained(pool, plan) for pool in considered)
    return replace(plan, considered=explained, reason=_shortfall(plan, considered))


def _pairs(considered: list[ServingPool]) -> list[tuple[ServingPool, ServingPool]]:
    """Of each number of devices and width of the cache the best pool, prefill with decode."""
    best: dict[tuple[str, int, int], ServingPool] = {}
    for pool in sorted((pool for pool in considered if pool.fits), key=lambda pool: -pool.replica.weight_bits):
        key = pool.role, pool.replica.kv_bits, pool.replica.devices
        if key not in best or pool.tokens_per_s > (1 + _TIE) * best[key].tokens_per_s:
            best[key] = pool
    pools = {role: [pool for pool in best.values() if pool.role == role] for role in ("prefill", "decode")}
    pairs = itertools.product(pools["prefill"], pools["decode"])
    return [(prefill, decode) for prefill, decode in pairs if prefill.replica.kv_bits == decode.replica.kv_bits]


def _replicas(devices: int, request: Request, wanted: float | None, prefill: ServingPool, decode: ServingPool) -> tuple[int, int]:
    """Replicas of both: as many as are needed, or the split of all devices that serves most."""
    reading, writing = prefill.tokens_per_s / request.prompt_tokens, decode.tokens_per_s / request.output_tokens
    if wanted is not None:
        return math.ceil(wanted / reading), math.ceil(wanted / writing)
    # Balanced where reading x p = writing x q with all devices used: the best whole numbers lie beside it, at least 1 of each.
    balanced = devices / (prefill.replica.devices + decode.replica.devices * reading / writing)
    splits = []
    for count in {max(1, math.floor(balanced)), math.floor(balanced) + 1}:
        left = max(1, (devices - count * prefill.replica.devices) // decode.replica.devices)
        splits.append((count, min(left, math.ceil(count * reading / writing))))
    inside = [p * prefill.replica.devices + q * decode.replica.devices <= devices for p, q in splits]
    return max(zip(inside, splits, strict=True), key=lambda pair: (pair[0], min(reading * pair[1][0], writing * pair[1][1])))[1]


def _served(request: Request, prefill: ServingPool, decode: ServingPool, readers: int, writers: int) -> float:
    return min(readers * prefill.tokens_per_s / request.prompt_tokens, writers * decode.tokens_per_s / request.output_tokens)


def _step(served: float) -> int:
    return math.floor(math.log(served) / math.log(1 + _TIE))


def _order(pool: ServingPool) -> tuple[float, ...]:
    """Best first: those that fit by tokens/s a device, then those nearest to their target."""
    return (0.0, -pool.tokens_per_s_per_device) if pool.fits else (1.0, pool.latency_s)


def _explained(pool: ServingPool, plan: ServingPlan) -> ServingPool:
    """The pool with the reason why it was not chosen."""
    chosen = plan.prefill if pool.role == "prefill" else plan.decode
    if not pool.fits or chosen is None or pool.replica == chosen.replica:
        return pool
    ratio = pool.tokens_per_s_per_device / chosen.tokens_per_s_per_device
    slowest = max(pool.time.parts, key=lambda part: pool.time.parts[part])
    share = pool.time.parts[slowest] / pool.time.seconds
    if ratio < 1 - _TIE:
        reason = f"{1 - ratio:.0%} fewer tokens/s a device; {share:.0%} of its time is {slowest}"
    elif pool.replica.kv_bits != chosen.replica.kv_bits:
        reason = "its cache has another width than the choice's, and both pools share one"
    elif ratio <= 1 + _TIE:
        reason = "as fast; the choice has fewer devices a replica or wider weights"
    else:
        reason = f"{ratio - 1:.0%} more tokens/s a device, but both pools together need more devices or serve less with it"
    return replace(pool, reason=reason)


def _shortfall(plan: ServingPlan, considered: list[ServingPool]) -> str:
    """Why the plan does not do what was asked, or nothing."""
    for role in ("prefill", "decode"):
        pools = [pool for pool in considered if pool.role == role]
        if not any(pool.fits for pool in pools):
            nearest = min(pools, key=_nearness)
            return f"no {role} pool fits {plan.topology.name}; nearest is {nearest.name}: {nearest.reason}"
    if plan.prefill is None:
        return "no width of the cache suits a prefill and a decode pool"
    if plan.devices > plan.topology.devices:
        what = "one replica of each pool" if plan.wanted_per_s is None else f"{plan.wanted_per_s:g} requests/s"
        return f"{what} needs {plan.devices} devices; {plan.topology.name} has {plan.topology.devices}"
    return ""


def _nearness(pool: ServingPool) -> tuple[bool, float]:
    """Those that memory holds first, then by latency; of the others by memory."""
    in_time = not pool.reason.startswith("needs")
    return (not in_time, pool.latency_s if in_time else pool.memory.bytes)


def _checked_request(model: ModelConfig, prompt: int, output: int, first: float, each: float) -> Request:
    for name, count in (("prompt_tokens", prompt), ("output_tokens", output)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name}={count!r}; expected a whole number of at least 1")
    _positive("time_to_first_token_s", first)
    _positive("time_per_token_s", each)
    request = Request(prompt_tokens=prompt, output_tokens=output, time_to_first_token_s=first, time_per_token_s=each)
    if request.context > model.max_position_embeddings:
        raise ValueError(
            f"prompt_tokens={prompt} and output_tokens={output} are {request.context} positions together, beyond the model's "
            f"max_position_embeddings={model.max_position_embeddings}; shorten one"
        )
    return request


def _positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name}={value!r}; expected a number above 0")


def _check_widths(name: str, given: Sequence[int], known: Sequence[int]) -> None:
    shown = ", ".join(map(str, known))
    if isinstance(given, str) or not given:
        raise ValueError(f"{name}={given!r}; expected one or more of {shown}")
    for bits in given:
        if bits not in known:
            near = min(known, key=lambda width: abs(width - bits)) if isinstance(bits, int) else known[0]
            raise ValueError(f"{name} has {bits!r} (did you mean {near}?); there are {shown}")
