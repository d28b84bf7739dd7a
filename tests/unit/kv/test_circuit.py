from kvrelay.kv.circuit import Circuit


def test_it_opens_after_failures_in_a_row() -> None:
    circuit = Circuit(threshold=2, first_open_s=1.0)
    assert not circuit.failed(now=10.0)
    circuit.succeeded()
    assert not circuit.failed(now=11.0)
    assert circuit.allows(now=11.0)
    assert circuit.failed(now=12.0)
    assert not circuit.allows(now=12.9)


def test_half_open_lets_one_call_through_and_its_success_closes() -> None:
    circuit = Circuit(threshold=1, first_open_s=1.0)
    circuit.failed(now=0.0)
    assert circuit.allows(now=1.0)
    assert not circuit.allows(now=1.0)
    assert circuit.is_open
    circuit.succeeded()
    assert circuit.allows(now=1.0)
    assert circuit.allows(now=1.0)


def test_each_failed_trial_doubles_the_wait_up_to_the_bound() -> None:
    circuit = Circuit(threshold=1, first_open_s=1.0, max_open_s=3.0)
    assert circuit.failed(now=0.0)
    assert circuit.allows(now=1.0)
    assert not circuit.failed(now=1.0)
    assert not circuit.allows(now=2.9)
    assert circuit.allows(now=3.0)
    circuit.failed(now=3.0)
    assert not circuit.allows(now=5.9)
    assert circuit.allows(now=6.0)


def test_a_trial_that_never_reports_is_given_up() -> None:
    circuit = Circuit(threshold=1, first_open_s=1.0)
    circuit.failed(now=0.0)
    assert circuit.allows(now=1.0)
    assert not circuit.allows(now=1.9)
    assert circuit.allows(now=2.0)


def test_a_trial_without_an_outcome_is_the_next_ones_to_make() -> None:
    circuit = Circuit(threshold=1, first_open_s=1.0)
    circuit.failed(now=0.0)
    circuit.withdraw(now=0.1)  # a call that was under way when it opened is no trial
    assert circuit.blocks(now=0.9)
    assert circuit.allows(now=1.0)
    circuit.withdraw(now=1.2)
    assert circuit.is_open
    assert circuit.allows(now=1.2)
    circuit.failed(now=1.3)
    assert circuit.blocks(now=3.2)


def test_failures_of_calls_that_were_under_way_say_nothing_new() -> None:
    circuit = Circuit(threshold=1, first_open_s=1.0)
    assert circuit.failed(now=0.0)
    assert not circuit.failed(now=0.1)
    assert circuit.allows(now=1.0)
