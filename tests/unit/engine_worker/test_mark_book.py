"""What a book of marks tells its reader, who keeps one of his own."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rolloutbus.bus.prefix_hashes import unpacked
from rolloutbus.engine_worker.prefixes import MAX_HELD, MAX_NEWS, PrefixHashSet

MARKS = st.integers(0, 20)


def told(book: PrefixHashSet) -> tuple[int, set[int], set[int]]:
    news = book.take()
    return news.seq, set(unpacked(news.added)), set(unpacked(news.removed))


def test_a_book_tells_what_came_and_what_went_since_the_last_time() -> None:
    book = PrefixHashSet()
    book.add(1)
    book.add(2)
    assert told(book) == (0, {1, 2}, set())
    book.drop(1)
    book.add(3)
    assert told(book) == (1, {3}, {1})
    assert not book.has_news


def test_what_comes_and_goes_in_between_is_not_told() -> None:
    book = PrefixHashSet()
    book.add(1)
    told(book)
    book.drop(1)
    book.add(1)
    book.add(2)
    book.drop(2)
    assert not book.has_news


def test_a_cleared_book_makes_its_reader_begin_anew() -> None:
    book = PrefixHashSet()
    book.add(1)
    told(book)
    book.clear()
    assert book.has_news
    book.add(2)
    assert told(book) == (0, {2}, set())


def test_a_new_reader_is_told_everything_bit_by_bit() -> None:
    book = PrefixHashSet()
    for mark in range(MAX_NEWS + 1):
        book.add(mark)
    told(book)
    told(book)
    book.begin_anew()
    assert told(book) == (0, set(range(MAX_NEWS)), set())
    assert told(book) == (1, {MAX_NEWS}, set())


def test_a_book_holds_no_more_than_its_reader_takes() -> None:
    book = PrefixHashSet()
    for mark in range(MAX_HELD + 10):
        book.add(mark)
    assert len(book) == MAX_HELD
    book.drop(0)
    book.add(MAX_HELD + 10)
    assert len(book) == MAX_HELD


class Books(RuleBasedStateMachine):
    """A cache, its book, and the book of who listens to it."""

    def __init__(self) -> None:
        super().__init__()
        self.held: set[int] = set()
        self.book = PrefixHashSet()
        self.reader = PrefixHashSet()
        self.next_seq = 0

    @rule(mark=MARKS)
    def come(self, mark: int) -> None:
        self.held.add(mark)
        self.book.add(mark)

    @rule(mark=MARKS)
    def go(self, mark: int) -> None:
        self.held.discard(mark)
        self.book.drop(mark)

    @rule()
    def clear(self) -> None:
        self.held.clear()
        self.book.clear()

    @rule()
    def replace_the_reader(self) -> None:
        self.reader, self.next_seq = PrefixHashSet(), 0
        self.book.begin_anew()

    @precondition(lambda self: self.book.has_news)
    @rule()
    def tell(self) -> None:
        news = self.book.take()
        assert news.seq in (0, self.next_seq)
        self.next_seq = news.seq + 1
        self.reader.apply(news)

    @invariant()
    def a_reader_without_news_to_come_knows_all(self) -> None:
        assert len(self.book) == len(self.held)
        if not self.book.has_news:
            assert len(self.reader) == len(self.held)
            self.reader.begin_anew()
            if self.held:
                assert set(unpacked(self.reader.take().added)) == self.held


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
