from ernie_jax.config.nearest import did_you_mean, nearest


def test_nearest_name():
    assert nearest("expret", ["data", "tensor", "pipeline", "expert"]) == "expert"
    assert did_you_mean("expret", iter(["data", "expert"])) == " (did you mean 'expert'?)"


def test_nothing_close_gives_no_suggestion():
    assert nearest("xyz", ["data", "expert"]) is None
    assert did_you_mean("xyz", ["data", "expert"]) == ""
