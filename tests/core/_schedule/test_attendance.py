"""Who is active at which step, without processes."""

from torch_join._schedule.attendance import Attendance


def test_attendance() -> None:
    attendance = Attendance(3)
    assert attendance.active_ranks == (0, 1, 2)
    attendance.announce({0: 0, 1: 1})
    assert attendance.active_ranks == (1, 2)
    assert attendance.joined(0)
    assert not attendance.joined(1)
    assert not attendance.is_last_step
    attendance.announce({2: 1})
    assert attendance.is_last_step
    attendance.go_to(1)
    assert attendance.active_ranks == ()
    assert not attendance.is_last_step
    assert [attendance.ended_last(rank) for rank in range(3)] == [False, True, True]


def test_who_may_still_go_on_ends_last() -> None:
    attendance = Attendance(2, first_step=5)
    attendance.announce({0: 7})
    assert [attendance.ended_last(rank) for rank in range(2)] == [False, True]
    assert attendance.active_ranks == (0, 1)
