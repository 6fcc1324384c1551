"""Pacers for tests whose network has no rate, and readings of links that have one."""

from atoll.peer.rounds.pacing import SAMPLE_S, Pacer
from atoll.peer.rounds.rates import FLOW_S, Sample


def unlimited():
    """Turns as long as nobody reads what is confirmed."""
    pacer = Pacer()
    pacer.expect_confirmations(False)
    return pacer


def samples(*rates_mbit_s, busy=True, step_s=0.1):
    """A counter that grows at these rates, one a step."""
    out, sent = [Sample(at_s=0.0, delivered=0, received=0, busy=busy)], 0
    for number, rate in enumerate(rates_mbit_s, 1):
        sent += int(rate * step_s / 8e-6)
        out.append(Sample(at_s=number * step_s, delivered=sent, received=sent, busy=busy))
    return out


def steady(mbit_s, seconds=FLOW_S, busy_share=1.0):
    """Samples of a link that carries so much, for which something waits this part of the time."""
    num = round(seconds / SAMPLE_S) + 1
    return [
        Sample(
            at_s=n * SAMPLE_S,
            delivered=round(n * SAMPLE_S * mbit_s / 8e-6),
            received=0,
            busy=n < busy_share * num,
        )
        for n in range(num)
    ]
