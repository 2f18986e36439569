"""The one helper that suggests names."""

from titanlite.runtime.errors import did_you_mean, nearest_name


def test_the_nearest_name_ignores_case_and_the_first_of_two_equal_names_wins() -> None:
    assert nearest_name("adamw", ["SGD", "AdamW"]) == "AdamW"
    assert nearest_name("ADAM", ["Adam", "adam"]) == "Adam"
    assert nearest_name("xyz", ["SGD", "AdamW"]) is None
    assert nearest_name("stepss", ["step"], cutoff=0.9) is None


def test_a_message_ends_with_the_suggestion_or_as_it_is() -> None:
    assert did_you_mean("stepz", ["steps", "seed"]) == ", did you mean steps?"
    assert did_you_mean("xyz", ["steps", "seed"]) == ""
