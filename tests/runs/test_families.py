"""Model families end to end: two steps of train.py, in which vLLM's log-probs are the actor's."""

import pytest
from families import PROBE, make_tiny, probe_difference, write


@pytest.mark.slow
@pytest.mark.parametrize("name", ["OLMo 2", "Gemma 2, window and caps", "Granite 3", "StableLM"])
def test_vllms_log_probs_are_the_actors(tmp_path, name):
    """One that vLLM runs through transformers' own class, capped scores and logits, scaled logits, dropped `packing`."""
    write(tmp_path / "model", name)
    difference = probe_difference(tmp_path / "model", make_tiny(tmp_path))
    assert isinstance(difference, float) and difference <= PROBE, difference
