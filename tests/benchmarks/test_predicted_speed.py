"""What `plan(disk=True)` predicts, beside what a disk of known speed then gives."""
import json

import pytest

from benchmarks.random_model import RandomModel
from benchmarks.shapes import TINY

PREDICT = """
import json, time, warp_embed
from warp_embed import Model
disk, path, rate = disks.attached(), sys.argv[1], float(sys.argv[2])
disk.watch(path + "/experts")
disk.bytes_per_s = rate
settings = {"memory": "30MB", "context": 1024, "threads": 1}
plan = warp_embed.plan(path, disk=True, **settings)
with Model.open(path, **settings) as model, model.session() as session:
    session.prefill(list(range(300)))
    for _ in range(30):
        session.step()
    before, start = model.stats(), time.perf_counter()
    for _ in range(40):
        session.step()
    token_s, after = (time.perf_counter() - start) / 40, model.stats()
first = plan.rungs[0]
trunk_s = 1 / first.tokens_per_s - first.read_bytes_per_token / plan.disk_bytes_per_s
read = (after["bytes_read"] - before["bytes_read"]) / 40
print(json.dumps([plan.disk_bytes_per_s / rate, plan.disk_direct, token_s, trunk_s + read / plan.disk_bytes_per_s]))
"""


@pytest.mark.slow                       # what it compares are times
@pytest.mark.parametrize("rate", [3e7])
def test_a_slow_disk_is_measured_and_decides(run_on_disk, tmp_path, rate):
    """Predicted for the reads that were needed: how many these are depends on the text."""
    path = tmp_path / "model.waste"
    RandomModel({**TINY, "num_experts": 80, "moe_intermediate_size": 512, "num_experts_per_token": 4}, "q8",
                "bf16").write(path)
    share, direct, real_s, predicted_s = json.loads(run_on_disk(PREDICT, path, rate))
    print(f"{real_s * 1e3:.1f} ms a token, {predicted_s * 1e3:.1f} predicted")
    assert 0.9 < share < 1.05 and isinstance(direct, bool)
    assert predicted_s == pytest.approx(real_s, rel=0.25)
