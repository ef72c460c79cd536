"""Every endpoint of a run, and which processes may use it. tests/unit/test_endpoints.py compares this table with the code.
tests/end_to_end/test_strangers_here.py checks that each endpoint refuses another user and another run.

Access control: Unix sockets by the folder's mode; HTTP over TCP by the run's token, behind TLS with the run's certificate; streams
by CURVE keys; etcd by client certificates; SGLang by its server's API key; the APIs of agents by session ids.
"""

from __future__ import annotations

from asyncrl.protocol import calls

# Owner -> route -> callers. `user`: a person's client that sends the token.
HTTP: dict[str, dict[str, str]] = {
    "generation_server": {
        "POST /generate": "rollout_worker",
        "POST /pause_generation": "gserver_manager",
        "POST /continue_generation": "gserver_manager",
        "POST /release_memory_occupation": "gserver_manager",
        "POST /resume_memory_occupation": "gserver_manager",
        "POST /fetch_weights": "gserver_manager",
        "GET /weights/{version}/{file}": "generation_server",
        "POST /update_weights_from_disk": "gserver_manager",
        "POST /abort_request": "user",
        "POST /flush_cache": "user",
        "GET /flush_cache": "user",
        "GET /health": "gserver_manager, user",
        "GET /health_generate": "user",
        "GET /get_model_info": "gserver_manager, model_worker, user",
        "GET /model_info": "user",
        "GET /get_server_info": "user",
        "GET /server_info": "model_worker, user",
        "GET /v1/loads": "gserver_manager, user",
        "GET /metrics": "user",
        "POST /init_weights_update_group": "model_worker",
        "POST /begin_weight_update": "model_worker",
        "POST /update_weights_from_distributed": "model_worker",
        "POST /end_weight_update": "model_worker",
        "POST /destroy_weights_update_group": "model_worker",
    },
    "gserver_manager": {
        "POST /allocate_rollout": "rollout_worker",
        "POST /finish_rollout": "rollout_worker",
        "POST /schedule_request": "rollout_worker",
        "POST /heartbeat": "rollout_worker",
        "POST /report": "master",
        "POST /evaluate": "master",
        "POST /scale": "user",
        "GET /servers": "user",
        "GET /get_model_version": "user",
        "GET /health": "user",
        "GET /metrics": "user",
        "GET /weights/{version}/{file}": "generation_server",
    },
    "model_worker": {
        "POST /held_data": "model_worker",
        "POST /kept_weights": "model_worker",
        "POST /held_weights": "model_worker",
        "POST /broadcast_weights": "gserver_manager",
    },
    "replayer": {"POST /report": "master"},
    # A process of a user, `asyncrl-launch ui`. It has a token of its own; / and /{file} are the same for every run, and open
    "ui": {
        "GET /": "-",
        "GET /{file}": "-",
        "GET /api/runs": "user",
        "GET /api/learning": "user",
        "GET /api/time": "user",
        "GET /api/processes": "user",
        "GET /api/trajectories": "user",
        "GET /api/trajectory": "user",
        "GET /api/advice": "user",
    },
    "rollout_worker": {
        "POST /v1/chat/completions": "agents, by a session's id",
        "POST /v1/completions": "agents, by a session's id",
        "POST /v1/responses": "agents, by a session's id",
        "POST /v1/messages": "agents, by a session's id",
        "GET /v1/models": "agents, by a session's id",
        "GET /v1/models/{model:.+}": "agents, by a session's id",
    },
}

# The stream's owner -> accepted messages -> senders.
STREAMS: dict[str, dict[str, str]] = {
    "model_worker: puller<head>": {"TrajectoryMeta": "rollout_worker, replayer"},
    "master: master_meta": {"TrajectoryMeta": "model_worker"},
    "model_worker: request_reply/<index>": {
        name: "master"
        for name, kind in vars(calls).items()
        if isinstance(kind, type) and getattr(getattr(kind, "__struct_config__", None), "tag", None) == name
    },
}

# Key of name resolve -> writers. All processes of the run can read; other clients have no access.
NAMES: dict[str, str] = {
    "owner": "launcher",
    "model_version": "master",
    "weights_held": "master",
    "weight_files": "gserver_manager",
    "weight_sender": "model_worker",
    "experiment_status": "master",
    "last_checkpoint": "master",
    "profile_request": "user, by `asyncrl-launch profile`",
    "profile_answer": "master",
    "generation_servers": "-",
    "generation_server": "generation_server",
    "desired_generation_servers": "user, by `asyncrl-launch scale`; gserver_manager, for POST /scale",
    "generation_drained": "-",
    "generation_server_drained": "gserver_manager",
    "gserver_manager": "gserver_manager; replayer in its place",
    "gserver_manager_began": "gserver_manager",
    "stream": "the stream's owner",
    "process_group": "model_worker",
    "devices_free": "master",
    "held_data": "model_worker",
    "held_weights": "model_worker",
    "statuses": "-",
    "status": "launcher, and a process that runs alone",
    "launcher": "launcher",
    "secrets": "launcher",
    "stop_request": "user, by `asyncrl-launch stop`",
    "desired_on": "-",
    "desired_process": "launcher",
    "host_daemons": "-",
    "host_daemon": "host daemon",
    "observed": "-",
    "observed_on": "host daemon",
}
