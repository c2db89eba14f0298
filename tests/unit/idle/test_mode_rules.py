"""Each trainer mode has its rule. That each has a trainer, too, is seen in tests/contract/test_driver_activation.py."""

from verl_tlt.idle.modes import MODE_RULES


def test_only_a_mode_whose_sampler_asks_at_any_moment_calls_back():
    assert {name: (rule.idle, rule.recall) for name, rule in MODE_RULES.items()} == {
        "sync": ("replicas", False),
        "colocate_async": ("replicas", True),
        "separate_async": ("trainer", False),
    }
