"""The pool of cache pages: who holds how many, counted, so that forks share and nothing leaks."""

from vivavoce.errors import CapacityError
from vivavoce.nn.paged import SCRATCH_PAGE


class PagePool:
    """Free pages and reference counts. Pure bookkeeping: the tensors are in `vivavoce.nn.paged`."""

    def __init__(self, pages: int) -> None:
        if pages < 2:
            raise CapacityError(f"a cache of {pages} pages holds nothing; give at least 2 (one is scratch)")
        self.holders = [0] * pages
        # The page given back last is taken first: it is still in the processor's caches, and others stay untouched.
        self._free = [page for page in reversed(range(pages)) if page != SCRATCH_PAGE]

    @property
    def size(self) -> int:
        """Pages that sequences can hold."""
        return len(self.holders) - 1

    @property
    def free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    def take(self) -> int:
        """A free page, now held once."""
        page = self._free.pop()
        self.holders[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more holder of a page that is held already."""
        if self.holders[page] == 0:
            raise AssertionError(f"page {page} is free and cannot be shared")
        self.holders[page] += 1

    def release(self, page: int) -> None:
        """One holder less; the last one frees the page."""
        if self.holders[page] == 0:
            raise AssertionError(f"page {page} was freed twice")
        self.holders[page] -= 1
        if self.holders[page] == 0:
            self._free.append(page)

    def is_shared(self, page: int) -> bool:
        """Whether writing into this page would be seen by another sequence."""
        return self.holders[page] > 1
