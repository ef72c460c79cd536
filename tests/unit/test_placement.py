"""Placement of processes on hosts: GPUs first, model workers side by side, and error messages that say which layout would fit."""

import re
from dataclasses import replace

import pytest

from asyncrl.config.processes import ModelConfig
from asyncrl.config.schema import ExperimentConfig, PromptSourceConfig, RolloutConfig, TaskConfig
from asyncrl.dataflow.topology import Allocation
from asyncrl.launch.hosts.placement import Host, Placement, PlacementError, placed
from asyncrl.launch.program import plan, server_spec

GPUS = tuple(str(number) for number in range(8))
CONFIG = ExperimentConfig(
    model_path="/m",
    prompts=PromptSourceConfig(path="/p.jsonl"),
    rollout=RolloutConfig(num_workers=4, tasks={"default": TaskConfig(reward="r:r")}),
)


def specs_of(allocation, **changes):
    return plan(replace(CONFIG, allocation=allocation, **changes), attempt=1, num_prompts=1000, devices=GPUS)


def host(number, gpus=0, **more):
    return Host(f"h{number}", f"10.0.0.{number}", GPUS[:gpus], cores=more.pop("cores", 8), **more)


def hosts_of(places, kind):
    return [place.host.name for name, place in sorted(places.items()) if name.startswith(kind)]


def test_a_server_has_its_gpus_on_one_host_and_model_workers_use_the_rest():
    placement = Placement([host(1, 8), host(2, 8), host(3, 8)], "h1")
    places = placement.place_all(specs_of("sglang.d3p1m4+d8p1m1"))
    servers = [places[f"generation_server/{index}"] for index in range(3)]
    assert [(server.host.name, len(server.gpus)) for server in servers] == [("h1", 4), ("h1", 4), ("h2", 4)]
    assert servers[0].gpus == ("0", "1", "2", "3")
    assert servers[1].gpus == ("4", "5", "6", "7")
    assert hosts_of(places, "model_worker") == ["h2"] * 4 + ["h3"] * 4
    taken = [(place.host.name, gpu) for place in places.values() for gpu in place.gpus]
    assert len(taken) == len(set(taken)) == 20


def test_light_processes_run_on_the_launchers_host_and_rollout_workers_are_spread():
    rollout = replace(CONFIG.rollout, num_workers=12)
    places = Placement([host(1, 4), host(2, 4)], "h2").place_all(specs_of("sglang.d2+d2", rollout=rollout))
    assert places["master/0"].host.name == places["gserver_manager/0"].host.name == "h2"
    assert set(hosts_of(places, "model_worker") + hosts_of(places, "generation_server")) == {"h1"}  # leaves four cores
    assert sorted(hosts_of(places, "rollout_worker")) == ["h1"] * 4 + ["h2"] * 8


def test_without_gpus_processes_share_cores_and_are_never_refused():
    placement = Placement([host(1, cores=2), host(2, cores=2), host(3, cores=2)], "h1")
    places = placement.place_all(specs_of("transformers.d2+d2"))
    assert len(set(hosts_of(places, "generation_server"))) == 2
    assert hosts_of(places, "model_worker") == ["h3", "h3"]
    crowded = Placement([host(1, cores=1)], "h1").place_all(specs_of("transformers.d8+d8"))
    assert set(hosts_of(crowded, "")) == {"h1"}


def test_the_error_says_which_layout_would_fit():
    with pytest.raises(
        PlacementError, match=r"generation_server/2 needs 4 GPUs on one host; free GPUs: h1: 0 of 8, h2: 3 of 3"
    ):
        Placement([host(1, 8), host(2, 3)], "h1").place_all(specs_of("sglang.d3p1m4+d2"))
    with pytest.raises(PlacementError, match="use 2 generation servers, which would fit, instead of 3"):
        Placement([host(1, 8), host(2, 3)], "h1").place_all(specs_of("sglang.d3p1m4+d2"))
    with pytest.raises(
        PlacementError, match=r"the run needs generation_servers 1, model_workers 8 GPUs and the hosts have 4"
    ):
        Placement([host(1, 4)], "h1").place_all(specs_of("sglang.d1+d8"))
    with pytest.raises(PlacementError, match=r"GB of memory; free memory: h1"):
        Placement([host(1, memory_bytes=10**9)], "h1").place_all(specs_of("transformers.d2+d2"))


def test_without_gpus_the_error_compares_the_memory():
    with pytest.raises(
        PlacementError,
        match=r"in total the run needs at least [\d.]+ GB of memory and the hosts have 1: use a smaller allocation, or more hosts$",
    ):
        Placement([host(1, memory_bytes=10**9)], "h1").place_all(specs_of("transformers.d1+d2"))


def test_processes_of_a_lost_host_are_placed_on_other_hosts_with_room():
    placement = Placement([host(1, 4), host(2, 2), host(3, 2)], "h1")
    specs = {spec.name: spec for spec in specs_of("sglang.d2+d2")}
    places = placement.place_all(list(specs.values()))
    assert set(hosts_of(places, "generation_server")) == {"h1"}
    placement.lose("h1")
    again = {name: placement.place(spec) for name, spec in specs.items() if places[name].host.name == "h1"}
    assert {place.host.name for place in again.values()} == {"h2", "h3"}
    placement.lose("h2")
    computing = [spec for spec in specs.values() if spec.computes]
    with pytest.raises(PlacementError, match="needs a GPU; free GPUs: h3"):
        placement.place_all(computing)
    placement.lose("h3")
    with pytest.raises(PlacementError, match="no host is left"):
        placement.place(specs["master/0"])


def test_a_restarted_process_keeps_its_place_and_a_released_place_is_reused():
    placement = Placement([host(1, 1), host(2, 1)], "h1")
    server, worker = (spec for spec in specs_of("sglang.d1+d1") if spec.computes)
    first = placement.place(server)
    assert placement.place(server) == first
    placement.place(worker)
    placement.release(server.name)
    assert placement.place(replace(server, name="generation_server/7")) == first


def test_a_placed_process_binds_to_its_host_and_sees_only_its_gpus():
    placement = Placement([host(1, 2), host(2, 2)], "h1")
    specs = specs_of("sglang.d2+d2")
    places = placement.place_all(specs)
    spec = next(spec for spec in specs if spec.name == "model_worker/1")
    here = placed(spec, places[spec.name], with_gpus=True)
    assert here.config.worker.runtime.host == "10.0.0.2"
    assert here.env["CUDA_VISIBLE_DEVICES"] == "1"
    master = next(spec for spec in specs if spec.name == "master/0")
    assert here.config.worker.gpus == here.env["CUDA_VISIBLE_DEVICES"].split(",")
    assert placed(master, places["master/0"], with_gpus=True).env["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in placed(spec, places[spec.name], with_gpus=False).env


def test_tensor_ranks_are_on_one_host():
    specs = specs_of("sglang.d1m2+m4")
    places = Placement([host(1, 5), host(2, 4)], "h1").place_all(specs)  # three GPUs of h1 stay free
    assert hosts_of(places, "generation_server") == ["h1"]
    assert hosts_of(places, "model_worker") == ["h2"] * 4
    both = specs_of("sglang.d1+d2m2")
    assert (
        hosts_of(Placement([host(1, 4), host(2, 2)], "h1").place_all(both), "model_worker") == ["h1"] * 2 + ["h2"] * 2
    )
    named = specs_of("sglang.d1@0+m2@1-2", cluster="hosts", hosts=["h1", "h2"])
    for splits in (False, True):
        few = Placement([host(1, 5), host(2, 3)], "h1", splits_tensor_groups=splits)
        across = placement_of("sglang.d1@0+m2@1-2", host(1, 2), host(2, 2), splits_tensor_groups=splits)
        if splits:
            assert hosts_of(few.place_all(specs), "model_worker") == ["h1"] * 3 + ["h2"]
            assert hosts_of(across.place_all(named), "model_worker") == ["h1", "h2"]
            continue
        with pytest.raises(
            PlacementError,
            match=r"model_worker/0 is one of 4 tensor ranks .* free GPUs: h1: 3, h2: 3. .*network.tensor_ranks_between_hosts=true",
        ):
            few.place_all(specs)
        with pytest.raises(PlacementError, match="the allocation puts model_worker/1 on h2"):
            across.place_all(named)


def test_tensor_ranks_of_several_models_that_share_a_worker_stay_together():
    models = [ModelConfig(name, "/m", "m2", workers) for name, workers in (("actor", [0, 1]), ("critic", [1, 2]))]
    specs = [
        replace(spec, config=replace(spec.config, models=models)) if spec.kind == "model_worker" else spec
        for spec in specs_of("sglang.d1+d3")
    ]
    places = Placement([host(1, 3), host(2, 3)], "h1").place_all(specs)
    assert hosts_of(places, "model_worker") == ["h2"] * 3


# ------------------------------------------------------------------------------------------------ devices that are named


def placement_of(allocation, *hosts, **more):
    """The hosts are filled in the other order than devices are counted."""
    return Placement(hosts[::-1], hosts[0].name, Allocation.parse(allocation), [host.name for host in hosts], **more)


def where(places, kind):
    return [(place.host.name, *place.gpus) for name, place in sorted(places.items()) if name.startswith(kind)]


def test_named_devices_count_the_gpus_of_all_hosts_and_are_shared():
    allocation = "sglang.d2m2@0-3+d4@0-3+actor_inf:d1@5"
    specs = specs_of(allocation, cluster="hosts", hosts=["h1", "h2"])
    places = placement_of(allocation, host(1, 2), host(2, 4)).place_all(specs)
    assert where(places, "generation_server") == [("h1", "0", "1"), ("h2", "0", "1")]
    assert where(places, "model_worker") == [("h1", "0"), ("h1", "1"), ("h2", "0"), ("h2", "1"), ("h2", "3")]
    assert all("CUDA_VISIBLE_DEVICES" not in spec.env for spec in specs)  # `placed` sets it


def test_without_gpus_every_host_has_an_equal_share_of_the_devices():
    allocation = "transformers.d4@0-3+d4@0-3+advantages:cpu1"
    hosts = [host(1, cores=1), host(2, cores=64)]
    places = placement_of(allocation, *hosts).place_all(specs_of(allocation))
    for kind in ("generation_server", "model_worker/[0-3]"):
        names = [name for name in sorted(places) if re.fullmatch(rf"{kind}(/\d)?", name)]
        assert [places[name].host.name for name in names] == ["h1", "h1", "h2", "h2"]
    assert places["model_worker/4"].host.name == "h2"  # a CPU worker goes where cores are free


@pytest.mark.parametrize(
    ("allocation", "said"),
    [
        ("sglang.d2@0-1+d2@2-3", r"model_worker/1 needs device 3, counted over all hosts from 0; GPUs: h1: 1, h2: 2"),
        ("sglang.d1m2@0-1+d2@0-1", r"generation_server/0 needs devices 0 to 1 on one host, and they are on h1 and h2"),
    ],
)
def test_devices_that_are_not_there_or_on_two_hosts_are_refused(allocation, said):
    with pytest.raises(PlacementError, match=said):
        placement_of(allocation, host(1, 1), host(2, 2)).place_all(specs_of(allocation, cluster="hosts"))


@pytest.mark.parametrize("gpus", [2, 0])
def test_the_devices_of_a_lost_host_move_together_and_the_others_stay(gpus):
    allocation = "sglang.d4@0-3+d4@0-3"
    specs = {spec.name: spec for spec in specs_of(allocation, cluster="hosts")}
    placement = placement_of(allocation, host(1, gpus), host(2, gpus), host(3, gpus))
    before = placement.place_all(list(specs.values()))
    lost = before["model_worker/0"].host.name
    placement.lose(lost)
    for index in range(4):
        server, worker = (placement.place(specs[f"{kind}/{index}"]) for kind in ("model_worker", "generation_server"))
        assert server == worker
        assert server.host.name != lost
        if before[f"model_worker/{index}"].host.name != lost:
            assert server == before[f"model_worker/{index}"]
    if gpus:
        devices = {(place.host.name, *place.gpus) for place in map(placement.place, specs.values()) if place.gpus}
        assert len(devices) == 4


def test_the_devices_of_a_lost_host_wait_for_it_if_no_other_has_room():
    allocation = "sglang.d4@0-3+d4@0-3"
    specs = {spec.name: spec for spec in specs_of(allocation, cluster="hosts")}
    placement = placement_of(allocation, host(1, 2), host(2, 2))
    before = placement.place_all(list(specs.values()))
    placement.lose("h1")
    with pytest.raises(PlacementError, match="needs device 0"):
        placement.place(specs["model_worker/0"])
    placement.add(host(1, 2))
    assert placement.place(specs["model_worker/0"]) == before["model_worker/0"]
    assert placement.place(specs["generation_server/3"]) == before["generation_server/3"]


def test_a_further_server_takes_no_gpu_that_is_a_device():
    config = replace(CONFIG, allocation="sglang.d1@0+d1@1", cluster="hosts")
    specs = {spec.name: spec for spec in specs_of(config.allocation, cluster="hosts")}
    placement = placement_of(config.allocation, host(1, 3))
    placement.place_all(list(specs.values()))
    placement.release("model_worker/0")  # it is being restarted
    further = server_spec(1, config, attempt=1, num_prompts=1000, devices=GPUS)
    assert placement.place(further).gpus == ("2",)
    assert placement.place(specs["model_worker/0"]).gpus == ("1",)
