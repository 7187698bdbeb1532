# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The three stability markers on everything a user can call."""

import asyncio
import copy
import enum
import inspect
import linecache
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from functools import cache, cached_property, partial, partialmethod
from pathlib import Path
from time import process_time
from timeit import repeat
from typing import NamedTuple, Protocol, runtime_checkable

import pytest

from mcore_parallel import deprecated, experimental_api, internal_api
from mcore_parallel._stability import pep702_deprecated

old = deprecated(version="0.1.0", removal_version="0.3.0", alternative="mcore_parallel.ParallelPlan")


@pytest.mark.parametrize(("marker", "level"), [(internal_api, "internal"), (experimental_api, "experimental")])
def test_labels_change_nothing_but_the_label(marker, level):
    def double(x: int) -> int:
        return 2 * x

    class Box:
        @property
        def size(self) -> int:
            return 3

    assert marker(double) is double and double.__mcore_stability__ == level and double(4) == 8
    assert marker(Box) is Box and Box.__mcore_stability__ == level and Box().size == 3
    size = vars(Box)["size"]
    assert marker(size) is size and size.fget.__mcore_stability__ == level


def test_a_deprecated_function_warns_at_the_callers_line_and_still_works():
    @old
    def double(x: int, *, times: int = 2) -> int:
        """Doubles."""
        return times * x

    with pytest.warns(DeprecationWarning, match=r"double is deprecated since 0\.1\.0 and goes in 0\.3\.0; use mcore_parallel") as caught:
        assert double(4, times=3) == 12
    assert caught[0].filename == __file__
    assert double.__doc__ == "Doubles." and list(inspect.signature(double).parameters) == ["x", "times"]
    assert double.__deprecated__ == str(caught[0].message)
    assert double.__mcore_deprecated__ == ("0.1.0", "0.3.0", "mcore_parallel.ParallelPlan")


def test_without_an_alternative_the_message_names_none():
    @deprecated("0.1.0", "0.3.0")
    def plain() -> None: ...

    assert plain.__deprecated__.endswith("goes in 0.3.0")


def test_methods_of_every_binding_and_properties_warn():
    class Box:
        @old
        def method(self, x: int) -> int:
            return x

        @classmethod
        @old
        def inside_class(cls, x: int) -> tuple[type, int]:
            return cls, x

        @old
        @classmethod
        def outside_class(cls, x: int) -> tuple[type, int]:
            return cls, x

        @old
        @staticmethod
        def static(x: int) -> int:
            return x

        @old
        @property
        def size(self) -> int:
            return 7

    class Child(Box):
        pass

    box = Child()
    for call, expected in (
        (lambda: box.method(1), 1),
        (lambda: Child.inside_class(2), (Child, 2)),
        (lambda: Child.outside_class(3), (Child, 3)),
        (lambda: box.static(4), 4),
        (lambda: Box.static(5), 5),
        (lambda: box.size, 7),
    ):
        with pytest.warns(DeprecationWarning, match="is deprecated since") as caught:
            assert call() == expected
        assert len(caught) == 1 and caught[0].filename == __file__


def test_a_deprecated_coroutine_stays_one_and_warns_when_awaited():
    @old
    async def fetch(x: int) -> int:
        return x + 1

    async def caller() -> int:
        return await fetch(1)

    assert inspect.iscoroutinefunction(fetch)
    with pytest.warns(DeprecationWarning, match="fetch") as caught:
        assert asyncio.run(caller()) == 2
    assert caught[0].filename == __file__


def test_a_deprecated_class_warns_when_built_and_when_subclassed_and_its_children_do_not_when_built():
    @old
    class Box:
        def __init__(self, x: int) -> None:
            self.x = x

    with pytest.warns(DeprecationWarning, match="Box") as caught:

        class Child(Box):
            pass

    assert len(caught) == 1 and caught[0].filename == __file__ and "class Child" in source_line(caught[0])
    assert inspect.isclass(Box) and list(inspect.signature(Box).parameters) == ["x"]
    with pytest.warns(DeprecationWarning, match="Box") as caught:
        box = Box(3)
    assert caught[0].filename == __file__ and isinstance(box, Box)
    assert Child(4).x == 4  # a warning would be an error here
    assert copy.copy(box).x == 3 and copy.deepcopy(box).x == 3

    class GrandChild(Child):
        pass

    assert GrandChild(5).x == 5


def source_line(warning: warnings.WarningMessage) -> str:
    return linecache.getline(warning.filename, warning.lineno)


def test_subclassing_through_a_metaclass_still_points_at_the_class_statement():
    @old
    class Shape(ABC):
        @abstractmethod
        def area(self) -> float: ...

        def __init_subclass__(cls, *, sides: int) -> None:
            cls.sides = sides

    with pytest.warns(DeprecationWarning, match="Shape") as caught:

        class Square(Shape, sides=4):
            pass

    assert Square.sides == 4 and "class Square" in source_line(caught[0])


@pytest.mark.parametrize("options", [{}, {"slots": True}, {"frozen": True, "kw_only": True}, {"order": True, "slots": True}])
@pytest.mark.parametrize("dataclass_first", [False, True])
def test_dataclasses_are_deprecated_in_either_order_of_decorators(options, dataclass_first):
    class Point:
        x: int
        y: int = 2

    Point.__annotations__ = {"x": int, "y": int}
    built = old(dataclass(**options)(Point)) if dataclass_first else dataclass(**options)(old(Point))
    with pytest.warns(DeprecationWarning, match="Point") as caught:
        point = built(x=1)
    assert (point.x, point.y) == (1, 2) and caught[0].filename == __file__ and len(caught) == 1
    assert copy.copy(point) == point and copy.deepcopy(point) == point
    assert fields(built)[0].name == "x" and list(inspect.signature(built).parameters) == ["x", "y"]
    with pytest.warns(DeprecationWarning):

        @dataclass(**options)
        class Child(built):
            z: int = 3

    assert Child(x=1).z == 3


def test_cached_properties_partials_and_cached_functions_warn_at_the_caller():
    class Box:
        @old
        @cached_property
        def size(self) -> int:
            return 7

        def add(self, x: int, y: int) -> int:
            return x + y

        add_one = old(partialmethod(add, 1))

    @old
    @cache
    def double(x: int) -> int:
        return 2 * x

    triple = old(partial(lambda factor, x: factor * x, 3))
    box = Box()
    for call, expected in ((lambda: box.size, 7), (lambda: box.add_one(2), 3), (lambda: double(2), 4), (lambda: triple(2), 6)):
        with pytest.warns(DeprecationWarning, match="is deprecated since") as caught:
            assert call() == expected
        assert len(caught) == 1 and caught[0].filename == __file__
    assert box.size == 7  # cached: no second warning
    assert double.cache_info().currsize == 1


def test_exceptions_and_subclasses_of_foreign_classes_are_built_as_before():
    @old
    class Failure(ValueError):
        pass

    @old
    class Table(dict):
        pass

    with pytest.warns(DeprecationWarning):
        assert Failure("a", 1).args == ("a", 1)
    with pytest.warns(DeprecationWarning):
        assert Table(a=1) == {"a": 1}


def test_a_place_warns_again_when_the_filters_ask_for_it_and_costs_little_when_they_do_not():
    @old
    def double(x: int) -> int:
        return 2 * x

    def use() -> int:
        return double(2)

    for action, number in (("always", 3), ("default", 1), ("ignore", 0), ("once", 1)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter(action)
            assert [use(), use(), use()] == [4, 4, 4]
        assert len(caught) == number, action
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        use()
        warnings.simplefilter("error")
        with pytest.raises(DeprecationWarning):
            use()
        with pytest.raises(DeprecationWarning):
            use()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.warns(DeprecationWarning):
            use()


def test_a_deprecated_call_costs_no_more_than_twenty_five_plain_ones():
    @old
    def double(x: int) -> int:
        return 2 * x

    bare = double.__wrapped__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Less than a microsecond where a plain call takes 0.04; a slower or busier processor has as much longer.
        costs = [min(repeat(lambda f=f: f(2), number=1_000, repeat=200, timer=process_time)) for f in (double, bare)]
    assert costs[0] < 25 * costs[1]


def test_the_mark_for_type_checkers_does_nothing_at_run_time():
    def double(x: int) -> int:
        return 2 * x

    assert pep702_deprecated("use scale")(double) is double


def test_a_deprecated_class_without_init_keeps_its_own_rules_of_construction():
    @old
    class Empty: ...

    @old
    class Made:
        def __new__(cls, x: int) -> "Made":
            made = super().__new__(cls)
            made.x = x
            return made

    @old
    class Pair(NamedTuple):
        a: int
        b: int

    @old
    @dataclass(frozen=True, kw_only=True, slots=True)
    class Frozen:
        x: int

    with pytest.warns(DeprecationWarning):
        Empty()
    with pytest.warns(DeprecationWarning), pytest.raises(TypeError, match="takes no arguments"):
        Empty(1)
    with pytest.warns(DeprecationWarning):
        assert Made(3).x == 3
    with pytest.warns(DeprecationWarning):
        assert Pair(1, b=2) == (1, 2)
    with pytest.warns(DeprecationWarning):
        assert Frozen(x=2).x == 2


def test_cooperative_inheritance_passes_through_a_deprecated_class():
    calls = []

    class Root:
        def __init__(self, **kwargs: int) -> None:
            calls.append(("root", kwargs))

    @old
    class Left(Root):
        pass

    class Right(Root):
        def __init__(self, *, right: int, **kwargs: int) -> None:
            calls.append(("right", right))
            super().__init__(**kwargs)

    with pytest.warns(DeprecationWarning):

        class Both(Left, Right):
            pass

    Both(right=1, root=2)
    assert calls == [("right", 1), ("root", {"root": 2})]


def test_protocols_and_enumerations_carry_the_metadata():
    @old
    class Shape(Protocol):
        def area(self) -> float: ...

    @old
    class Colour(enum.Enum):
        RED = 1

    assert "Shape" in Shape.__deprecated__ and "Colour" in Colour.__deprecated__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Colour(1) is Colour.RED


def test_what_satisfies_a_protocol_does_so_after_it_is_marked():
    @experimental_api
    @runtime_checkable
    class Shape(Protocol):
        def area(self) -> float: ...

    class Square:
        def area(self) -> float:
            return 1.0

    assert isinstance(Square(), Shape) and not isinstance(1, Shape)


@pytest.mark.parametrize(
    ("version", "removal_version", "names"),
    [
        ("0.1", "0.3.0", "version='0.1'"),
        ("0.1.0", "next", "removal_version='next'"),
        ("0.1.0", "0.2.0", "promise 0.3.0 or later"),
        ("1.4.2", "1.5.9", "promise 1.6.0 or later"),
        ("1.4.2", "0.9.0", "promise 1.6.0 or later"),
    ],
)
def test_a_clock_that_breaks_the_promise_is_refused(version, removal_version, names):
    with pytest.raises(ValueError, match=names):
        deprecated(version, removal_version)


@pytest.mark.parametrize(("version", "removal_version"), [("0.1.0", "0.3.0"), ("0.1.7", "1.0.0"), ("1.9.0", "2.0.0"), ("1.9.0", "1.11.0")])
def test_a_clock_of_two_minor_versions_or_a_later_major_is_accepted(version, removal_version):
    deprecated(version, removal_version)


def test_the_file_is_the_same_in_every_wheel():
    root = Path(__file__).parents[3]
    copies = sorted((root / "packages").glob("*/src/*/_stability.py"))
    assert len(copies) == 6
    assert len({path.read_bytes() for path in copies}) == 1
