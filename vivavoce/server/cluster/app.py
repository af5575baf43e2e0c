"""A fleet on Ray Serve: an ingress, the roll, and pools of replicas.

`viva serve --ray` runs it; `serve deploy` takes it as `import_path: vivavoce.server.cluster.app:build`.
"""

import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vivavoce.errors import CapacityError, MissingDependencyError
from vivavoce.log import configure
from vivavoce.server.cluster.options import FleetOptions, PoolOptions, SessionPolicy
from vivavoce.server.cluster.registry import RegistryActor, RemoteRegistry
from vivavoce.server.cluster.replica import Replica

if TYPE_CHECKING:
    from ray.serve import Application

APP = "viva"
ALONE = {"include_dashboard": False, "object_store_memory": 100 << 20}  # no sound goes through Ray's store
UNBOUNDED = 1_000_000  # nothing may queue in Ray: who cannot be served is refused by us


def build(args: Mapping[str, Any]) -> "Application":
    """The Serve application of a config's `args`; InputError or CapacityError where it cannot be."""
    import ray

    options = FleetOptions.read(args)
    check_room(options, ray.cluster_resources())
    return application(options)


def application(options: FleetOptions) -> "Application":
    """The Serve application of a fleet."""
    from ray import serve

    roll = serve.deployment(
        RegistryActor,
        name="roll",
        max_ongoing_requests=UNBOUNDED,
        ray_actor_options={"num_cpus": 0},
        logging_config={"enable_access_log": False},  # it is called several times a second
    ).bind()
    pools = [
        _pool(role, pool, options).bind(role, pool, replace(options.server, api_keys=()), roll, options.drain_seconds)
        for role, pool in options.pools.items()
    ]

    def asgi() -> Any:
        from vivavoce.server.cluster.ingress import ingress_app

        configure(options.server.log_level, options.server.log_format)
        desk = serve.get_deployment_handle("roll", serve.get_replica_context().app_name)
        return ingress_app(options, RemoteRegistry(desk))

    ingress = serve.deployment(
        serve.ingress(asgi)(),
        name="ingress",
        num_replicas=options.ingresses,
        max_ongoing_requests=UNBOUNDED,
        ray_actor_options={"num_cpus": options.ingress_cpus},
        graceful_shutdown_timeout_s=options.server.resume_seconds,
    )
    return ingress.bind(roll, *pools)


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
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise MissingDependencyError("a fleet needs Ray Serve: pip install 'vivavoce[ray]'") from error
    if not ray.is_initialized():
        os.environ.setdefault("RAY_worker_niceness", "0")  # sound is in a hurry; Ray's workers step back for everybody
        ray.init(address, log_to_driver=False, **({} if _is_elsewhere(address) else ALONE))
    check_room(options, ray.cluster_resources())
    serve.start(http_options={"host": options.server.host, "port": options.server.port})
    serve.run(application(options), name=APP, route_prefix="/")


def _is_elsewhere(address: str | None) -> bool:
    return address is not None or "RAY_ADDRESS" in os.environ


def stop() -> None:
    """End the fleet, and Ray where it was started here."""
    import ray
    from ray import serve

    serve.shutdown()
    ray.shutdown()


def check_room(options: FleetOptions, there: Mapping[str, float]) -> None:
    """Raise CapacityError where a cluster can never hold the smallest fleet; Ray would wait for ever."""
    pools = options.pools.values()
    need = {
        "CPU": options.ingresses * options.ingress_cpus + sum(pool.least * pool.cpus for pool in pools),
        "GPU": sum(pool.least * pool.gpus for pool in pools),
    }
    for name, count in need.items():
        have = there.get(name, 0.0)
        if count > have:
            what = f"{have:g} {name}s" if have else f"no {name}s"
            raise CapacityError(f"the fleet needs {count:g} {name}s and the cluster has {what}; add nodes or ask less")


def _pool(role: str, pool: PoolOptions, options: FleetOptions) -> Any:
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    policy = AutoscalingPolicy(
        policy_function=f"{SessionPolicy.__module__}:{SessionPolicy.__name__}",
        policy_kwargs={
            "target": pool.target,
            "late_share": pool.late_share,
            "least_slack": pool.least_slack_ms / 1000,
        },
    )
    scaling = AutoscalingConfig(
        min_replicas=pool.least,
        max_replicas=pool.most,
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
