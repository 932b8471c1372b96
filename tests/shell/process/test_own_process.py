from epp.shell.process.loop_lag import LoopLag
from epp.shell.process.own_process import OwnProcess


class Measured:
    def __init__(self):
        self.now_s = 100.0
        self.cpu_s = 5.0
        self.process = OwnProcess(
            LoopLag(lambda _: None),
            cpu=lambda: self.cpu_s,
            resident=lambda: 200_000_000,
            clock=lambda: self.now_s,
        )

    def run(self, seconds, cores):
        for _ in range(seconds):
            self.now_s += 1.0
            self.cpu_s += cores
            self.process.look()


def test_cpu_is_that_of_the_last_minute():
    measured = Measured()
    assert measured.process.lately().cpu_cores is None, "it has only begun"
    measured.run(30, 0.5)
    assert measured.process.lately().cpu_cores == 0.5
    measured.run(60, 0.1)
    assert round(measured.process.lately().cpu_cores, 9) == 0.1


def test_a_page_has_what_was_taken_since_the_start():
    measured = Measured()
    measured.run(10, 1.0)
    snapshot = measured.process.snapshot()
    assert (snapshot.cpu_s, snapshot.resident_bytes) == (15.0, 200_000_000)
