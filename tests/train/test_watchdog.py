import json

import torch._C._distributed_c10d as c10d

from ridgeline.train.watchdog import behind_of, last_collectives, told


def report(rank, step, *finished, doing="training"):
    made = [
        {"name": "nccl:all_reduce", "number": 7 + i, "group": "0 default", "sizes": [], **kind}
        for i, kind in enumerate({"finished": done} for done in finished)
    ]
    return {
        "rank": rank, "host": "node0", "pid": 10 + rank, "step": step, "doing": doing,
        "seconds": 61.0, "collectives": made, "stack": [],
    }  # fmt: skip


def reports(*each):
    return {one["rank"]: one for one in each}


def test_who_is_behind():
    waiting, idle = report(0, 5, True, False), report(1, 5, True, True)
    assert behind_of(reports(waiting, idle), 2) == [1]
    assert behind_of(reports(waiting, report(1, 4, False)), 2) == [1]
    assert behind_of(reports(waiting, report(2, 5, False)), 3) == [1]  # no word of it
    assert behind_of(reports(waiting, report(1, 5, False)), 2) == [0, 1]  # each waits for another


def test_what_is_said(tmp_path):
    text = told(reports(report(0, 5, True, False), report(2, 5, True)), 4, 60.0, tmp_path)
    lines = text.splitlines()
    assert lines[0] == "train: no progress for 60 s; behind: rank 1, rank 3"
    assert lines[1] == (
        "  rank 0 (node0 pid 10): training of step 5 for 61 s, waits in nccl:all_reduce 8 of "
        "group 0 default"
    )
    assert lines[2] == "  rank 1: gave no report; it is stopped, killed or cut off"
    assert lines[3].endswith("last finished nccl:all_reduce 7 of group 0 default")
    assert lines[-1] == f"  stacks and more: {tmp_path}"


def test_without_a_collective_there_is_nothing_to_tell(monkeypatch):
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):  # other tests' may be recorded
        monkeypatch.setattr(c10d, name, lambda **_: json.dumps({"entries": []}), raising=False)
    assert last_collectives() == []
    assert "no collective yet" in told(reports(report(0, 1)), 1, 1.0, "x")
