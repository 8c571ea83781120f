"""Files for clusters tell their processes what these need."""

import re
from pathlib import Path

import pytest
import yaml

from tw_ranks._joining.launchers import find_places

FOLDER = Path(__file__).parents[3] / "docs/examples/cluster"


def documents(name):
    assert FOLDER.exists(), "run the tests from a checkout: examples are under docs"
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def test_the_indexed_job_tells_its_pods_what_they_need():
    job, service, _ = documents("indexed-job.yaml")
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    told = {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}
    told |= {"JOB_COMPLETION_INDEX": "1", "HOSTNAME": f"{name}-1"}  # By Kubernetes.
    [place] = find_places(told)
    assert not place.fault
    assert (place.rank, place.size) == (1, spec["completions"])
    assert place.coordinator[0] == f"{name}-0.{service['metadata']['name']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}


@pytest.mark.parametrize("name", ["trainjob.yaml", "indexed-job.yaml"])
def test_the_manifests_keep_others_away_from_the_servers(name):
    job, *_, policy = documents(name)
    assert policy["kind"] == "NetworkPolicy"
    selector = policy["spec"]["podSelector"]
    assert set(selector["matchLabels"].values()) == {job["metadata"]["name"]}
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": selector}]}]


def test_the_batch_script_starts_its_tasks_by_srun():
    script = (FOLDER / "fit.sbatch").read_text()
    assert re.search(r"^srun .* python fit\.py", script, re.MULTILINE)
    options = re.findall(r"^#SBATCH --([a-z-]+)=", script, re.MULTILINE)
    assert {"nodes", "ntasks-per-node"} <= set(options)
