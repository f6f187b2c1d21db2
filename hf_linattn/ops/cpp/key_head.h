// What kernels work on: one key head of one row of the batch, and the query heads that share it.
//
// `key_row` and `value_row` are head_dim and value_dim in whole vectors: the length of rows in scratch
// memory.

#pragma once

#include "dtypes.h"
#include "matrix.h"
#include "scratch.h"

// Key heads that go through the tokens together, chunk by chunk: their rows lie side by side, so what is
// fetched for one, lines and addresses of pages, is there for the next. States stay in a cache of the core,
// and each thread gets some heads.
template <class Problem>
int64_t heads_together(const Problem& p) {
    constexpr int64_t FLOATS = 1 << 16;
    const int64_t state = int64_t(padded(p.head_dim)) * padded(p.value_dim);
    const int64_t share = p.batch * p.kv_heads / p.threads;
    return std::max<int64_t>(1, std::min({FLOATS / state, share, p.kv_heads}));
}

template <class Problem>
class KeyHead {
    static constexpr int BLOCKS = 64;  // of a thread's memory, at most

protected:
    const Problem& p_;
    const int64_t row_, shared_;
    int64_t head_, batch_head_;
    const int head_dim_, value_dim_, key_row_, value_row_;

    KeyHead(const Problem& p, int64_t batch_head)
        : p_(p),
          row_(batch_head / p.kv_heads),
          shared_(p.heads / p.kv_heads),
          head_(batch_head % p.kv_heads),
          batch_head_(batch_head),
          head_dim_(p.head_dim),
          value_dim_(p.value_dim),
          key_row_(padded(head_dim_)),
          value_row_(padded(value_dim_)) {}

    // Turn to some key heads of the same row, from this one on, and back.
    template <class Do>
    void for_each_head(int heads, Do with) {
        for (int index = 0; index < heads; ++index, ++head_, ++batch_head_) with(index);
        head_ -= heads;
        batch_head_ -= heads;
    }

    static void reserve(int64_t count) { Scratch::of_thread().reserve(count, BLOCKS); }
    static float* alloc(int64_t rows, int64_t columns) { return Scratch::of_thread().take(rows * columns); }
    template <class Element>
    static Element* alloc_of(int64_t count) {
        return reinterpret_cast<Element*>(Scratch::of_thread().take(count));
    }

    int64_t first_query() const { return head_ * shared_; }
    int64_t last_query() const { return (head_ + 1) * shared_; }

    // Elements from the first one of a dense `[B, H, N]` to that of a query.
    int64_t query_offset(int64_t head, int64_t token) const {
        return (row_ * p_.heads + head) * p_.length + token;
    }

    // Whether a token does not count, of problems that know of such.
    bool hidden(int64_t token) const {
        return p_.valid && !at<uint8_t>(p_.valid)[row_ * p_.valid_row + token];
    }

    void read_row(const Array& x, int64_t head, int64_t token, float* to, int count, int row) const {
        read(x, offset(x, row_, head, token), count, to);
        for (int i = count; i < row; ++i) to[i] = 0;
    }

    struct Rows {
        const float* data;
        int64_t stride;
    };

    // Some tokens of the key head: where they lie if they are whole vectors of float32 there, else in `tile`.
    Rows rows_of(const Array& x, int from, int count, int width, int row, float* tile) const {
        if (x.dtype == FLOAT32 && width == row)
            return {at<float>(x.data) + offset(x, row_, head_, from), x.token};
        for (int j = 0; j < count; ++j) read_row(x, head_, from + j, tile + j * row, width, row);
        return {tile, row};
    }
};
