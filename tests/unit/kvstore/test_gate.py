import threading

from kvstore.gate import Gate

WAIT_S = 10.0


def test_whoever_wants_to_be_alone_waits_for_those_inside_and_keeps_others_out() -> None:
    gate, order = Gate(), []
    wants_in = threading.Event()

    def be_alone() -> None:
        with gate.alone():
            order.append("alone")
            wants_in.wait(WAIT_S)
            order.append("still alone")

    def go_in() -> None:
        with gate.inside():
            order.append("inside")

    alone, late = threading.Thread(target=be_alone), threading.Thread(target=go_in)
    with gate.inside(), gate.inside():
        alone.start()
        with gate._changed:
            assert gate._changed.wait_for(lambda: gate._closed, WAIT_S)
        assert order == []
    late.start()
    wants_in.set()
    alone.join(WAIT_S)
    late.join(WAIT_S)
    assert order == ["alone", "still alone", "inside"]


def test_a_failure_opens_the_gate_again() -> None:
    gate = Gate()
    for way in (gate.inside, gate.alone, gate.inside):
        try:
            with way():
                raise LookupError
        except LookupError:
            pass
    with gate.alone():
        pass
