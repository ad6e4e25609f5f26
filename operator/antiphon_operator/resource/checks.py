"""What the CRD's rules cannot say about a Model, checked by the operator into the condition `Ready`.

CEL cannot look into `podTemplate`, cannot calculate with quantities on Kubernetes 1.30, and should not say what only
this version refuses: a Model that a newer operator accepts must not be refused by an older CRD.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from antiphon_operator.resource.effective import EffectiveModel, EffectivePool
from antiphon_operator.resource.model import Bounds
from antiphon_operator.resource.pod_template import pod_template_problems
from antiphon_operator.resource.problems import Problem
from antiphon_operator.resource.quantities import QuantityError, parse_quantity
from antiphon_operator.resource.reasons import Reason
from antiphon_operator.resource.worker_flags import instead_of_flag

__all__ = ["Problem", "check"]


def check(model: EffectiveModel) -> list[Problem]:
    """All problems; an empty list: the Model can be rendered."""
    found = [*_engine(model), *_kv_cache(model), *_budget(model)]
    for pool in model.pools:
        found += _resources(model, pool)
        found += pod_template_problems(model, pool)
    return found


def _engine(model: EffectiveModel) -> Iterator[Problem]:
    engine = model.spec.engine
    if engine.name == "vllm":
        yield _problem("spec.engine.name", "this version has no vllm engine: write torch")
    if engine.name == "timed":
        for pool in model.pools:
            if pool.ranks > 1 or pool.spec.parallelism.expert > 1:
                yield _problem(
                    f"spec.{pool.role}.parallelism", "the timed engine computes nothing that ranks share: remove it"
                )
    for index, argument in enumerate(engine.args):
        instead = instead_of_flag(argument)
        if instead is not None:
            yield _problem(f"spec.engine.args[{index}]", f"{argument} may not be given here: {instead}")


def _kv_cache(model: EffectiveModel) -> Iterator[Problem]:
    if model.spec.kv_cache.tiers:
        yield _problem(
            "spec.kvCache.tiers",
            "engines of this version keep KV blocks on the device only: remove tiers",
        )


def _budget(model: EffectiveModel) -> Iterator[Problem]:
    """A budget that the bounds' lower ends already exceed could never be kept."""
    scaling = model.spec.autoscaling
    if scaling.gpu_budget is None or model.accelerator is None:
        return
    bounds: Mapping[str, Bounds] = {"prefill": scaling.prefill, "decode": scaling.decode}
    least = sum(bounds[pool.role].min * pool.devices for pool in model.pools)
    if least > scaling.gpu_budget:
        yield _problem(
            "spec.autoscaling.gpuBudget",
            f"the fewest replicas of the pools need {least} devices already: raise gpuBudget or lower min",
        )


def _resources(model: EffectiveModel, pool: EffectivePool) -> Iterator[Problem]:
    resources = pool.spec.resources
    derived = {model.accelerator: "it follows from parallelism and gpusPerPod"}
    derived[model.spec.kv_cache.transfer.rdma.resource] = "it follows from spec.kvCache.transfer.rdma"
    for which, amounts in (("requests", resources.requests), ("limits", resources.limits)):
        for name, amount in amounts.items():
            path = f"spec.{pool.role}.resources.{which}.{name}"
            if name in derived:
                yield _problem(path, f"remove {name}: {derived[name]}")
            try:
                parse_quantity(amount)
            except QuantityError as error:
                yield _problem(path, str(error))
                return
    for name, limit in resources.limits.items():
        request = resources.requests.get(name, limit)
        path = f"spec.{pool.role}.resources.requests.{name}"
        if parse_quantity(request) > parse_quantity(limit):
            yield _problem(path, f"{request} is more than its limit of {limit}: lower it or raise the limit")
        elif "/" in name and parse_quantity(request) != parse_quantity(limit):
            yield _problem(path, f"{name} cannot be shared: request and limit must be equal")


def _problem(path: str, message: str) -> Problem:
    return Problem(path, Reason.SPEC_REFUSED, message)
