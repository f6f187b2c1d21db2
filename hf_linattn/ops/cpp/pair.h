// What kernels work on: one key head of one row, and the queries that share it.

#pragma once

#include "memory.h"
#include "numbers.h"
#include "tiles.h"

template <class AnyProblem>
class Pair {
    static constexpr int PIECES = 24;  // of a thread's memory, at most

protected:
    const AnyProblem& p_;
    const int64_t row_, head_, shared_, pair_;
    const int size_, wide_, size_row_, wide_row_;

    Pair(const AnyProblem& p, int64_t pair)
        : p_(p),
          row_(pair / p.kv_heads),
          head_(pair % p.kv_heads),
          shared_(p.heads / p.kv_heads),
          pair_(pair),
          size_(p.size),
          wide_(p.wide),
          size_row_(padded(size_)),
          wide_row_(padded(wide_)) {}

    static void reserve(int64_t count) { Memory::own().reserve(count, PIECES); }
    static float* matrix(int64_t rows, int64_t columns) { return Memory::own().take(rows * columns); }

    int64_t first_query() const { return head_ * shared_; }
    int64_t last_query() const { return (head_ + 1) * shared_; }

    // The place of a query in `[B, H, N]`.
    int64_t of_query(int64_t head, int64_t token) const {
        return (row_ * p_.heads + head) * p_.length + token;
    }

    void read_row(const Array& x, int64_t head, int64_t token, float* to, int count, int row) const {
        read(x, x.at(row_, head, token), count, to);
        for (int i = count; i < row; ++i) to[i] = 0;
    }
};
