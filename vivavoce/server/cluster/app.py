"""A fleet on Ray Serve: ingresses, the replica registry, and pools of replicas.

`viva serve --ray` runs it; `serve deploy` takes it as `import_path: vivavoce.server.cluster.app:build`.
"""

import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from vivavoce.log import configure
from vivavoce.server.cluster.options import FleetOptions, PoolOptions, SessionPolicy
from vivavoce.server.cluster.registry import RegistryActor, RegistryClient
from vivavoce.server.cluster.replica import Replica

APP = "viva"
REGISTRY = "registry"
LOCAL_CLUSTER = {"include_dashboard": False, "object_store_memory": 100 << 20}  # audio does not pass Ray's store
UNBOUNDED = 1_000_000  # nothing may queue in Ray: the ingress refuses what cannot be served


def build(args: Mapping[str, Any]) -> Application:
    """The Serve application of a config's `args`; raises InputError or CapacityError where it cannot be deployed."""
    options = FleetOptions.read(args)
    options.check_capacity(ray.cluster_resources())
    return application(options)


def application(options: FleetOptions) -> Application:
    """The Serve application of a fleet."""
    registry = serve.deployment(
        RegistryActor,
        name=REGISTRY,
        max_ongoing_requests=UNBOUNDED,
        ray_actor_options={"num_cpus": 0},
        logging_config={"enable_access_log": False},  # it is called several times a second
    ).bind()
    server = replace(options.server, api_keys=())
    pools = [
        _pool(role, pool, options).bind(role, pool, server, registry, options.drain_seconds)
        for role, pool in options.pools.items()
    ]

    def asgi() -> Any:
        from vivavoce.server.cluster.ingress import ingress_app  # only the ingress processes load it

        configure(options.server.log_level, options.server.log_format)
        handle = serve.get_deployment_handle(REGISTRY, serve.get_replica_context().app_name)
        return ingress_app(options, RegistryClient(handle.call.remote))

    ingress = serve.deployment(
        serve.ingress(asgi)(),
        name="ingress",
        num_replicas=options.ingresses,
        max_ongoing_requests=UNBOUNDED,
        ray_actor_options={"num_cpus": options.ingress_cpus},
        graceful_shutdown_timeout_s=options.server.resume_seconds,
    )
    return ingress.bind(registry, *pools)


def run(options: FleetOptions, address: str | None = None) -> None:
    """Serve a fleet until interrupted, on the Ray cluster at an address or on this machine alone."""
    options.check()
    start(options, address)
    is_over = threading.Event()
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: is_over.set())
        is_over.wait()
    finally:
        stop()


def start(options: FleetOptions, address: str | None = None) -> None:
    """Deploy a fleet and return when it is running."""
    if not ray.is_initialized():
        os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's workers run at niceness 15, too low for real time
        is_cluster = address is not None or "RAY_ADDRESS" in os.environ
        ray.init(address, log_to_driver=False, **({} if is_cluster else LOCAL_CLUSTER))
    options.check_capacity(ray.cluster_resources())
    serve.start(http_options={"host": options.server.host, "port": options.server.port})
    serve.run(application(options), name=APP, route_prefix="/")


def stop() -> None:
    """End the fleet, and Ray where it was started here."""
    serve.shutdown()
    ray.shutdown()


def _pool(role: str, pool: PoolOptions, options: FleetOptions) -> Any:
    policy = AutoscalingPolicy(
        policy_function=f"{SessionPolicy.__module__}:{SessionPolicy.__name__}",
        policy_kwargs={
            "target": pool.target,
            "late_share": pool.late_share,
            "min_slack": pool.min_slack_ms / 1000,
        },
    )
    scaling = AutoscalingConfig(
        min_replicas=pool.min_replicas,
        max_replicas=pool.max_replicas,
        upscale_delay_s=pool.grow_seconds,
        downscale_delay_s=pool.shrink_seconds,
        look_back_period_s=pool.look_back_seconds,
        policy=policy,
    )
    return serve.deployment(
        Replica,
        name=role,
        autoscaling_config=scaling,
        max_ongoing_requests=UNBOUNDED,
        ray_actor_options={"num_cpus": pool.cpus, "num_gpus": pool.gpus},
        health_check_period_s=2.0,
        graceful_shutdown_timeout_s=options.drain_seconds + 10,
        graceful_shutdown_wait_loop_s=0.5,
    )
