"""Configuration of the autoscaler, which controls the ratio of prefill to decode instances."""

from __future__ import annotations

from dataclasses import dataclass

from baton.config.flags import option, require, require_at_least

_ABOVE_ZERO = ("scale_prefill_queue_s", "scale_decode_queue", "scale_interval_s", "scale_window_s", "scale_start_s")
_AT_LEAST_ZERO = ("scale_ttft_ms", "scale_itl_ms", "scale_cooldown_s", "scale_drain_s", "scale_max_instances")


KUBERNETES_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
KUBERNETES_API_HELP = "URL of the API server; default: the one of this pod's cluster"
KUBERNETES_ACCOUNT_HELP = "folder with the service account's token, ca.crt, namespace"


@dataclass(frozen=True)
class AutoscaleConfig:
    """Targets and bounds of the controller. A role is under pressure where one of its signals is above its target."""

    scale_prefill_queue_s: float = option(
        1.0, "prefill is pressed above so many seconds of prompts that wait, at the measured speed"
    )
    scale_kv: float = option(0.8, "decode is pressed above this share of its KV blocks in use")
    scale_decode_queue: float = option(2.0, "decode is pressed above so many requests that wait per instance")
    scale_ttft_ms: float = option(
        0.0, "prefill is pressed above this time to first token (p90, milliseconds); decode, where requests wait there"
    )
    scale_itl_ms: float = option(
        0.0, "decode is pressed above this time between tokens (p90, milliseconds); prefill, where decode helps it out"
    )
    scale_relaxed: float = option(
        0.7, "an instance is taken from a role only if the rest would be at most at this share of its targets"
    )
    scale_idle: float = option(
        0.3, "with --scale-max-instances: an instance ends if the rest would be at most at this share"
    )
    scale_window_s: float = option(15.0, "seconds over which signals are averaged: shorter peaks have no effect")
    scale_cooldown_s: float = option(60.0, "least seconds between two changes")
    scale_interval_s: float = option(1.0, "seconds between two looks")
    scale_min_prefill: int = option(1, "prefill instances that stay at least")
    scale_min_decode: int = option(1, "decode instances that stay at least")
    scale_max_instances: int = option(
        0, "instances of both roles at most: they are started and ended; 0: their number stays, they change roles"
    )
    scale_start_s: float = option(
        300.0, "seconds without progress after which an instance that does not get ready is given up, and taken back"
    )
    scale_drain_s: float = option(30.0, "seconds in which requests may end on an instance, before they go on elsewhere")
    scale_dry_run: bool = option(False, "only say what would be done, and why")

    def __post_init__(self) -> None:
        require(self, _ABOVE_ZERO, lambda x: x > 0, "be above 0")
        require_at_least(self, 0, *_AT_LEAST_ZERO)
        require(self, ["scale_kv"], lambda x: 0 < x <= 1, "be above 0 and at most 1")
        require(self, ["scale_relaxed"], lambda x: 0 < x < 1, "be between 0 and 1")
        require(self, ["scale_idle"], lambda x: 0 <= x < self.scale_relaxed, "be at least 0 and below scale_relaxed")
        require(self, ["scale_window_s"], lambda x: x <= 180, "be at most 180")
        require(self, ["scale_interval_s"], lambda x: x <= self.scale_window_s, "be at most scale_window_s")
        require_at_least(self, 0, "scale_min_prefill")
        require_at_least(self, 1, "scale_min_decode")
        least = self.scale_min_prefill + self.scale_min_decode
        require(self, ["scale_max_instances"], lambda x: x == 0 or x >= least, f"be 0 or at least {least}, which stay")


@dataclass(frozen=True)
class KubernetesConfig:
    """Deployments that the controller scales."""

    kubernetes_prefill: str = option("", "Deployment of the prefill instances, whose replicas are patched")
    kubernetes_decode: str = option("", "Deployment of the decode instances, likewise")
    kubernetes_namespace: str = option("", "where they are; default: this pod's namespace")
    kubernetes_api: str = option("", KUBERNETES_API_HELP)
    kubernetes_account: str = option(KUBERNETES_ACCOUNT, KUBERNETES_ACCOUNT_HELP)
