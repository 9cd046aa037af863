"""cluster render, as a user calls it: files or a stream, one line for wrong input, never a secret."""

import re
import sys
from pathlib import Path

import pytest
import yaml
from render_job import JOB, OWN, TARGETS

from orchestrator.cli.app import call

IMAGE = "training-orchestrator:cpu"
PLANTED = "s3cr3t-Planted-4711"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(JOB))
    return path


def code_of(*words: str | Path) -> int:
    with pytest.raises(SystemExit) as end:
        call(["cluster", "render", *map(str, words)])
    assert isinstance(end.value.code, int)
    return end.value.code


@pytest.mark.parametrize("target", TARGETS)
def test_to_a_folder_and_to_a_stream(
    target: str, job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(target, job, *TARGETS[target], "--to", tmp_path / "out") == 0
    files = {p.name: yaml.safe_load(p.read_text()) for p in (tmp_path / "out").iterdir()}
    said = capsys.readouterr()
    assert f"written to {tmp_path / 'out'}" in said.out
    assert re.search(rf"^next: \S.* {re.escape(str(tmp_path / 'out'))}", said.err, re.M)
    assert code_of(target, job, *TARGETS[target]) == 0
    text = capsys.readouterr().out
    files.pop("kustomization.yaml", None)
    assert sorted(map(str, yaml.safe_load_all(text))) == sorted(map(str, files.values()))
    assert "&id" not in text


@pytest.mark.parametrize("target", [*TARGETS, "slurm"])
@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("workload.model=gpt-tini", "unknown model 'gpt-tini'"),
        ("parallel={tp: 3}", "tp 3 does not divide the model's 4 attention heads"),
    ],
)
def test_a_job_that_could_run_nowhere_is_refused(
    target: str, override: str, says: str, job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = TARGETS.get(target, ["--runs", "/shared/runs"])
    assert code_of(target, job, *words, "--to", tmp_path / "out", "--set", override) == 2
    said = capsys.readouterr()
    assert says in said.err
    assert len(said.err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_the_job_travels_whole(job: Path, tmp_path: Path) -> None:
    assert (
        code_of("kuberay", job, *TARGETS["kuberay"], "--to", tmp_path / "out", "--set", "train.steps=7") == 0
    )
    files = yaml.safe_load((tmp_path / "out/configmap.yaml").read_text())["data"]
    carried = yaml.safe_load(files["job.yaml"])
    assert (carried["name"], carried["train"]["steps"]) == ("Big.Run", 7)
    found = yaml.safe_load((tmp_path / "out/rayjob.yaml").read_text())
    assert found["metadata"]["name"].startswith("big-run-")
    assert "--run-dir s3://bucket/runs/Big.Run\n" in files["run.sh"]


def test_settings_reach_the_controller_too_and_secrets_by_reference(job: Path, tmp_path: Path) -> None:
    words = ["--env", "HTTPS_PROXY=http://proxy", "--secret-env", "HF_TOKEN", "--secret", "mine"]
    words += ["--secret-env", "AWS_ACCESS_KEY_ID=other.key", "--set", "notify.webhook=$SLACK"]
    assert code_of("kuberay", job, *TARGETS["kuberay"], *words, "--to", tmp_path / "out") == 0
    spec = yaml.safe_load((tmp_path / "out/rayjob.yaml").read_text())["spec"]["rayClusterSpec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        env = {each["name"]: each for each in container["env"]}
        assert len(env) == len(container["env"])
        assert env["HTTPS_PROXY"]["value"] == "http://proxy"
        keys = {name: env[name]["valueFrom"]["secretKeyRef"] for name in ("HF_TOKEN", "AWS_ACCESS_KEY_ID")}
        assert keys["HF_TOKEN"] == {"name": "mine", "key": "HF_TOKEN"}
        assert keys["AWS_ACCESS_KEY_ID"] == {"name": "mine", "key": "other.key"}


def test_a_claim_holds_the_runs(job: Path, tmp_path: Path) -> None:
    assert code_of("kuberay", job, *OWN, "--runs", "pvc:shared", "--to", tmp_path / "out") == 0
    spec = yaml.safe_load((tmp_path / "out/rayjob.yaml").read_text())["spec"]
    files = yaml.safe_load((tmp_path / "out/configmap.yaml").read_text())["data"]
    assert "--run-dir /runs/Big.Run\n" in files["run.sh"]
    pod = spec["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]
    assert pod["volumes"] == [{"name": "runs", "persistentVolumeClaim": {"claimName": "shared"}}]


@pytest.mark.parametrize("target", TARGETS)
def test_what_the_machine_knows_is_not_rendered(
    target: str, job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "RAY_AUTH_TOKEN", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, PLANTED)
    assert code_of(target, job, *TARGETS[target]) == 0
    assert PLANTED not in "".join(capsys.readouterr())


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("override", "where"),
    [
        (f"tracking.uri=postgresql://user:{PLANTED}@db/mlflow", "tracking.uri"),
        (f"data.sources=[{{uri: 'https://host/a.txt?token={PLANTED}'}}]", "data.sources.0.uri"),
        (f"workload.options={{api_key: {PLANTED}}}", "workload.options.api_key"),
    ],
)
def test_a_job_that_carries_a_credential_is_refused(
    target: str, override: str, where: str, job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(target, job, *TARGETS[target], "--to", tmp_path / "out", "--set", override) == 2
    said = "".join(capsys.readouterr())
    assert where in said
    assert PLANTED not in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["kuberay", *OWN, "--runs", f"s3://me:{PLANTED}@bucket/runs"], "--runs"),
        (["kuberay", *TARGETS["kuberay"], "--redis", f"redis://:{PLANTED}@redis:6379"], "--redis"),
        (["kuberay", *TARGETS["kuberay"], "--endpoint", f"http://me:{PLANTED}@store"], "--endpoint"),
        (["kuberay", *TARGETS["kuberay"], "--redis", "redis"], "is not an address of a Redis"),
        (["kuberay", *TARGETS["kuberay"], "--endpoint", "notaurl"], "is not a URL of a store"),
        (["kuberay", *OWN, "--runs", "runs"], "would be lost with the pod"),
        (["skypilot", "--runs", f"s3://me:{PLANTED}@bucket/runs"], "--runs"),
        (["skypilot", "--runs", "/shared/runs"], "would be lost with the machine"),
        (
            ["skypilot", *TARGETS["skypilot"], "--setup", f"pip install git+https://me:{PLANTED}@host/x"],
            "--setup: carries a credential",
        ),
        (
            ["slurm", "--runs", "/shared/runs", "--sbatch=--export=WANDB_API_KEY=" + PLANTED],
            "--sbatch: carries a credential",
        ),
        (["skypilot", *TARGETS["skypilot"], "--set", "resources.per_worker.gpu=1"], "name one, such as H100"),
        (
            ["skypilot", *TARGETS["skypilot"], "--set", "resources.per_worker.labels={team: blue}"],
            "started without labels",
        ),
        (["kuberay", *TARGETS["kuberay"], "--queue", "slurm"], "write kueue:NAME or volcano:NAME"),
        (
            ["kuberay", *TARGETS["kuberay"], "--queue", "kueue:team", "--keep-failed", "0"],
            "--keep-failed: Kueue takes only jobs whose cluster goes with them",
        ),
        (["kuberay", *TARGETS["kuberay"], "--platform", "moon"], "choose one of eks, karpenter, gke, aks"),
        (["kuberay", *TARGETS["kuberay"], "--accelerator", "H100"], "the job asks for no GPU"),
        (["kuberay", *TARGETS["kuberay"], "--crds", "nowhere"], "KubeRay's CRD files"),
        (["kuberay", *TARGETS["kuberay"], "--kubeconfig", "nowhere"], "there is no file"),
        (["kuberay", *TARGETS["kuberay"], "--rdma", "rdma/ib"], "the job asks for no GPU"),
        (["kuberay", *TARGETS["kuberay"], "--rdma", "rdma/ib=0"], "write DOMAIN/NAME or DOMAIN/NAME=N"),
        (
            [
                *("kuberay", *TARGETS["kuberay"], "--memory-gib", "4", "--set", "resources.per_worker.gpu=1"),
                *("--set", "workload.model=llama-3-8b"),
            ],
            "--memory-gib 4: two copies of the run's state",
        ),
        (["kuberay", *TARGETS["kuberay"], "--env", "NCCL_DEBUG"], "write NAME=VALUE"),
        (["kuberay", *TARGETS["kuberay"], "--env", "A=1", "--env", "A=2"], "A is given twice"),
        (["kuberay", *TARGETS["kuberay"], "--env", f"API_TOKEN={PLANTED}"], "give --secret-env API_TOKEN"),
        (["kuberay", *TARGETS["kuberay"], "--secret-env", f"a {PLANTED}"], "write NAME or NAME=KEY"),
        (
            ["kuberay", *TARGETS["kuberay"], "--secret-env", "A", "--env", "A=1"],
            "--secret-env: A is given twice",
        ),
        (["kuberay", *TARGETS["kuberay"], "--namespace", "Foo_Bar"], "'Foo_Bar' is not a DNS label"),
        (["kuberay", *TARGETS["kuberay"], "--secret", "Foo_B"], "'Foo_B' is not a name"),
        (["kuberay", *TARGETS["kuberay"], "--service-account", "A_B"], "'A_B' is not a name"),
        (["kuberay", *OWN, "--runs", "pvc:A_B"], "'A_B' is not a name"),
        (["aws", *OWN, "--set", "resources.per_worker.gpu=1"], "--machine: the job needs GPUs"),
        (["aws", *OWN, "--set", "resources.per_worker.labels={ray.io/market-type: on-demand}"], "--spot"),
        (["aws", *OWN, "--region", "eu-central-1"], "name the zones of eu-central-1"),
        (["local", *OWN, "--head-ip", "10.0.0.1", "--worker-ip", "10.0.0.1"], "given twice"),
        (
            ["local", *TARGETS["local"], "--set", "resources.per_worker.labels={team: blue}"],
            "started without labels",
        ),
        (
            ["kuberay", *TARGETS["kuberay"], "--set", "resources.notices=gcp"],
            "resources.notices: is gcp, but the nodes run on aws",
        ),
        (["aws", *OWN, "--set", "resources.notices=azure"], "is azure, but the nodes run on aws"),
        (
            [
                "kuberay",
                *TARGETS["kuberay"],
                "--set",
                "resources.per_worker.labels={ray.io/region: 'in(a,b)'}",
            ],
            "name one of them",
        ),
        (
            ["kuberay", *TARGETS["kuberay"], "--image", IMAGE, "--set", "resources.per_worker.gpu=1"],
            "has no CUDA",
        ),
        (
            ["kuberay", *TARGETS["kuberay"], "--per-node", "1", "--set", "parallel={tp: 8}"],
            "must share a node",
        ),
    ],
)
def test_wrong_input_is_one_line(
    words: list[str], says: str, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(words[0], job, *words[1:]) == 2
    said = capsys.readouterr()
    assert says.split(": ")[-1] in said.err
    assert len(said.err.strip().splitlines()) == 1
    assert PLANTED not in said.err + said.out


@pytest.mark.parametrize("target", TARGETS)
def test_paths_that_only_this_machine_has_are_pointed_out(
    target: str, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--set", "data.sources=[{uri: corpus/*.txt}]"]
    words += ["--set", "tracking={uri: 'sqlite:///mlflow.db'}"]
    assert code_of(target, job, *TARGETS[target], *words) == 0
    read, written = capsys.readouterr().err.splitlines()
    assert read.startswith("note: every worker reads corpus/*.txt locally")
    assert written.startswith("note: tracking.uri sqlite:///mlflow.db would be on one machine")


@pytest.mark.parametrize("target", TARGETS)
def test_libraries_that_no_image_has_by_itself_are_pointed_out(
    target: str, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--set", "sinks={wandb: {project: a}}", "--set", "data.clean=[{near_duplicates: {}}]"]
    assert code_of(target, job, *TARGETS[target], *words) == 0
    assert capsys.readouterr().err == (
        "note: data.clean.near_duplicates needs datatrove, data.clean.near_duplicates needs rensa, sinks.wandb needs "
        "wandb: install the extras clean,data,sinks there; infra/Dockerfile has --build-arg EXTRAS=clean,data,sinks\n"
    )
    assert code_of(target, job, *TARGETS[target]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("runs", "module", "extra"), [("gs://b/x", "gcsfs", "gcs"), ("abfs://c@a/x", "adlfs", "azure")]
)
def test_a_store_names_the_extra_that_it_needs(
    runs: str,
    module: str,
    extra: str,
    job: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    assert code_of("kuberay", job, *OWN, "--runs", runs) == 2
    said = f"--runs: '{runs}' needs {module}, which is not installed; pip install -e '.[{extra}]' in the checkout"
    assert capsys.readouterr().err == f"orchestrator: {said}\n"
    monkeypatch.setattr("orchestrator.storage.uri.find_spec", lambda name: True)
    monkeypatch.setattr("fsspec.get_filesystem_class", lambda name: None)
    assert code_of("kuberay", job, *OWN, "--runs", runs) == 0
    assert f"--build-arg EXTRAS={extra}" in capsys.readouterr().err  # the image needs it too


def test_pods_without_a_right_to_their_store_are_pointed_out(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("orchestrator.storage.uri.find_spec", lambda name: True)
    monkeypatch.setattr("fsspec.get_filesystem_class", lambda name: None)
    words = ["--runs", "gs://bucket/runs", *OWN, "--platform", "gke"]
    for account, said in (([], True), (["--service-account", "trainer"], False)):
        assert code_of("kuberay", job, *words, *account) == 0
        assert ("the pods have no right to gs://" in capsys.readouterr().err) is said


def test_a_queue_of_kueue_must_cover_the_disk(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("kuberay", job, *TARGETS["kuberay"], "--queue", "kueue:team") == 0
    assert "must cover ephemeral-storage" in capsys.readouterr().err


def test_what_a_job_needs_of_the_cluster_is_said(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--set", "resources.per_worker.gpu=1", "--set", "resources.notices=aws", "--accelerator", "H100"]
    assert code_of("kuberay", job, *TARGETS["kuberay"], *words) == 0
    memory, metadata, nodes = capsys.readouterr().err.splitlines()
    assert "a worker needs 13 GiB of memory" in memory
    assert "node's metadata" in metadata
    assert "ray.io/accelerator-type=H100" in nodes


def test_on_aws_a_gpu_job_is_told_of_the_image_s_driver(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = ["--set", "resources.per_worker.gpu=1"]
    assert code_of("aws", job, *OWN, *gpu, "--machine", "g5.xlarge") == 0
    assert "node_config.ImageId" in capsys.readouterr().err
    assert code_of("gcp", job, *TARGETS["gcp"], *gpu, "--machine", "g2-standard-8") == 0
    assert code_of("aws", job, *OWN) == 0
    assert "ImageId" not in capsys.readouterr().err


def test_two_device_types_are_two_groups(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--set",
        "resources.per_worker.gpu=1",
        "--accelerator",
        "H100",
        "--accelerator",
        "A100",
        "--spot",
    ]
    assert code_of("kuberay", job, *TARGETS["kuberay"], *words) == 0
    found = {m["kind"]: m for m in yaml.safe_load_all(capsys.readouterr().out)}
    groups = found["RayJob"]["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert [(g["groupName"], g["minReplicas"]) for g in groups] == [("h100-spot", 1), ("a100-spot", 0)]


@pytest.mark.parametrize("target", ["aws", "kuberay"])
def test_only_its_own_files_are_written_anew(
    target: str, job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert code_of(target, job, *TARGETS[target], "--to", out) == 0
    assert code_of(target, job, *TARGETS[target], "--to", out, "--image", IMAGE) == 0
    (last := sorted(out.iterdir())[-1]).write_text("mine\n")
    before = {path: path.read_text() for path in out.iterdir()}
    capsys.readouterr()
    assert code_of(target, job, *TARGETS[target], "--to", out) == 2
    assert capsys.readouterr().err == (
        f"orchestrator: {last}: was not written by this command; move it away\n"
    )
    assert {path: path.read_text() for path in out.iterdir()} == before


@pytest.mark.parametrize("target", sorted(TARGETS.keys() - {"skypilot"}))
def test_an_image_that_no_registry_has_is_not_taken_for_granted(
    target: str, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for word in TARGETS[target] if word not in OWN]
    assert code_of(target, job, *words) == 2
    assert "--image" in capsys.readouterr().err


def test_pull_secrets_reach_the_pods(job: Path, tmp_path: Path) -> None:
    words = [*TARGETS["kuberay"], "--pull-secret", "one", "--pull-secret", "two", "--to", tmp_path / "out"]
    assert code_of("kuberay", job, *words) == 0
    found = yaml.safe_load((tmp_path / "out/rayjob.yaml").read_text())["spec"]["submitterPodTemplate"]
    assert found["spec"]["imagePullSecrets"] == [{"name": "one"}, {"name": "two"}]


def test_one_folder_starts_one_cluster_whichever_was_rendered_there_before(job: Path, tmp_path: Path) -> None:
    for words, started in (([], "rayjob"), (["--standing"], "raycluster"), ([], "rayjob")):
        assert code_of("kuberay", job, *TARGETS["kuberay"], *words, "--to", tmp_path / "out") == 0
        names = {path.name for path in (tmp_path / "out").iterdir()}
        assert names == {"configmap.yaml", "networkpolicy.yaml", "kustomization.yaml", f"{started}.yaml"}
    (tmp_path / "out/raycluster.yaml").write_text("mine\n")
    assert code_of("kuberay", job, *TARGETS["kuberay"], "--to", tmp_path / "out") == 0
    assert (tmp_path / "out/raycluster.yaml").read_text() == "mine\n"


def test_the_job_can_be_read_in_its_config_map(job: Path, tmp_path: Path) -> None:
    prompt = "evaluate={every: 1, samples: {prompts: [\"ä:\\n  b\", 'c # d '], tokens: 2}}"
    assert code_of("kuberay", job, *TARGETS["kuberay"], "--to", tmp_path / "out", "--set", prompt) == 0
    lines = (tmp_path / "out/configmap.yaml").read_text().splitlines()
    assert "    name: Big.Run" in lines
    assert "      sequence_length: 16" in lines
    data = yaml.safe_load((tmp_path / "out/configmap.yaml").read_text())["data"]
    assert yaml.safe_load(data["job.yaml"])["evaluate"]["samples"]["prompts"] == ["ä:\n  b", "c # d "]


@pytest.mark.parametrize(
    ("words", "requested", "copies"),
    [
        ([], "30Gi", 20.0),
        (["--disk-gib", "200"], "200Gi", 190.0),
        (["--disk-gib", "12"], "12Gi", 6.0),
        (["--set", "data.node_cache=50"], "60Gi", 50.0),
        (["--runs", "pvc:shared"], "10Gi", None),
        (["--runs", "pvc:shared", "--set", "data.cache=s3://bucket/shards"], "30Gi", 20.0),
    ],
)
def test_copies_of_shards_fit_on_the_disk_that_pods_request(
    words: list[str], requested: str, copies: float | None, job: Path, tmp_path: Path
) -> None:
    """Unset, they would take half of what is free on the node, whose disk every pod sees whole."""
    assert code_of("kuberay", job, *TARGETS["kuberay"], *words, "--to", tmp_path / "out") == 0
    spec = yaml.safe_load((tmp_path / "out/rayjob.yaml").read_text())["spec"]["rayClusterSpec"]
    (container,) = spec["workerGroupSpecs"][0]["template"]["spec"]["containers"]
    assert container["resources"]["requests"]["ephemeral-storage"] == requested
    data = yaml.safe_load((tmp_path / "out/configmap.yaml").read_text())["data"]
    assert yaml.safe_load(data["job.yaml"])["data"]["node_cache"] == copies


def test_a_disk_that_its_copies_fill_is_refused(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--disk-gib", "40", "--set", "data.node_cache=40"]
    assert code_of("kuberay", job, *TARGETS["kuberay"], *words) == 2
    assert capsys.readouterr().err == (
        "orchestrator: --disk-gib 40: copies of shards may take 40 GiB of it (data.node_cache); give 50, or lower "
        "data.node_cache\n"
    )
