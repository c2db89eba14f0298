"""The drafters of the end-to-end benchmark are made from other prompts than it compares on."""

import pyarrow.parquet as pq

from benchmarks.e2e import head
from tests.toy.assets import build_assets


def test_a_warm_up_has_none_of_the_prompts_that_are_compared_on(tmp_path):
    asked = build_assets(tmp_path, train_rows=head.BENCH_PROMPTS, val_rows=1, seed=head.BENCH_SEED)
    head.other_prompts(tmp_path / "other.parquet", 200, head.BENCH_SEED, head.BENCH_PROMPTS)
    given, compared = (
        [row["prompt"][0]["content"] for row in pq.read_table(file).to_pylist()]
        for file in (tmp_path / "other.parquet", asked.train)
    )
    assert len(set(given)) == 200 and not set(given) & set(compared)
