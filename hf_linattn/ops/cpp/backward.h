// Gradients of the forward, recomputed chunk by chunk in two sweeps: the formulas are in
// ops/loop_backward.py.

#pragma once

#include "head.h"

// What gradients need, causal or not. `turned_` is the transpose of S, or of the loss by it.
class Gradients : protected Head {
protected:
    float *g_, *row_of_output_, *slopes_, *d_query_, *d_key_, *d_value_, *turned_, *t_;
    State sums_;

    Gradients(const Problem& p, float eps, int64_t pair, int64_t more_memory)
        : Head(p, eps, pair, memory(p) + more_memory),
          g_(matrix(chunk_row_, wide_row_)),
          row_of_output_(matrix(1, wide_row_)),
          slopes_(matrix(chunk_row_, size_row_)),
          d_query_(matrix(chunk_row_, size_row_)),
          d_key_(matrix(chunk_row_, size_row_)),
          d_value_(matrix(chunk_row_, wide_row_)),
          turned_(matrix(wide_row_, size_row_)),
          t_(matrix(shared_, p.length)),
          sums_(state(p.S, p.z)) {}

    static int64_t memory(const Problem& p) {
        const int64_t n = chunk_row(p), size = padded(p.size), wide = padded(p.wide);
        return n * (3 * size + 2 * wide) + wide + size * (2 * wide + 1) + p.heads / p.kv_heads * p.length;
    }

    float* slopes() const { return p_.map == NONE ? nullptr : slopes_; }
    float* d_decay(int64_t start) const { return at<float>(p_.d_decay) + pair_ * p_.length + start; }
    float* t(int64_t head, int64_t start) const { return t_ + (head - first_query()) * p_.length + start; }

    // g of a chunk; and t, where it is not known yet.
    void read_loss(int64_t head, int64_t start, int count, bool first) {
        for (int i = 0; i < count; ++i) {
            float* g = g_ + i * wide_row_;
            const int64_t place = of_query(head, start + i);
            read_row(p_.d_output, head, start + i, g, wide_, wide_row_);
            if (p_.normalise) {
                const float total = at<float>(p_.total)[place], inverse = total > 0 ? 1 / total : 0;
                for (int e = 0; e < wide_row_; e += WIDTH) store(g + e, load(g + e) * inverse);
            }
            if (!first) continue;
            float& shift = t(head, start)[i];
            shift = p_.d_total ? at<float>(p_.d_total)[place] : 0;
            if (!p_.normalise) continue;
            read_row(p_.output, head, start + i, row_of_output_, wide_, wide_row_);
            shift -= dot(g, row_of_output_, wide_row_);
        }
    }

    // R = sum_i phi(q_i) g_i^T and r = sum_i t_i phi(q_i), or more of them.
    void add_losses(const float* shift, int count) {
        const Left queries{query_, 1, size_row_};
        product(queries, size_, count, g_, wide_row_, sums_.S, wide_row_, wide_row_, !sums_.empty);
        for (int d = 0; d < size_row_; d += WIDTH) {
            Floats total = sums_.empty ? Floats{} : load(sums_.z + d);
            for (int i = 0; i < count; ++i) total += load(query_ + i * size_row_ + d) * shift[i];
            store(sums_.z + d, total);
        }
        sums_.empty = false;
    }

    // What keys and values of a chunk owe to queries that see them through the sums.
    void by_sums(int count) {
        if (sums_.empty) {
            memset(d_key_, 0, chunk_row_ * size_row_ * sizeof(float));
            memset(d_value_, 0, chunk_row_ * wide_row_ * sizeof(float));
            return;
        }
        transposed(sums_.S, wide_row_, size_row_, wide_row_, turned_, size_row_);
        for (int j = 0; j < count; ++j) memcpy(d_key_ + j * size_row_, sums_.z, size_row_ * sizeof(float));
        product(Left{value_, wide_row_, 1}, count, wide_, turned_, size_row_, d_key_, size_row_, size_row_,
                true);
        product(Left{key_, size_row_, 1}, count, size_, sums_.S, wide_row_, d_value_, wide_row_, wide_row_,
                false);
    }

    void write_keys(int64_t start, int count) {
        float* key_slopes = slopes();
        for (int j = 0; j < count; ++j) {
            float *d_key = d_key_ + j * size_row_, *d_value = d_value_ + j * wide_row_;
            if (hidden(start + j)) {
                memset(d_key, 0, size_row_ * sizeof(float));
                memset(d_value, 0, wide_row_ * sizeof(float));
                if (key_slopes) memset(key_slopes + j * size_row_, 0, size_row_ * sizeof(float));
            }
            if (p_.d_decay) d_decay(start)[j] -= dot(d_key, key_ + j * size_row_, size_row_);
            if (links_.split) scale(d_key, links_.entering[j], size_row_);
            write_by_slope(p_.d_key, head_, start, j, d_key, key_slopes);
            write(p_.d_value, p_.d_value.at(row_, head_, start + j), wide_, d_value);
        }
    }

    void write_by_slope(const Array& to, int64_t head, int64_t start, int row, float* found,
                        const float* slopes) const {
        if (slopes)
            for (int d = 0; d < size_row_; d += WIDTH)
                store(found + d, load(found + d) * load(slopes + row * size_row_ + d));
        write(to, to.at(row_, head, start + row), size_, found);
    }
};

class Backward : Gradients {
    float *across_, *value_across_, *scores_, *d_scores_, *query_slopes_;
    const bool once_;  // one chunk, and nothing before it: all gradients in one sweep

    static int64_t memory(const Problem& p) {
        const int64_t n = chunk_row(p);
        return n * (2 * padded(p.size) + padded(p.wide) + 2 * n);
    }

public:
    Backward(const Problem& p, float eps, int64_t pair)
        : Gradients(p, eps, pair, memory(p)),
          across_(matrix(size_row_, chunk_row_)),
          value_across_(matrix(wide_row_, chunk_row_)),
          scores_(matrix(chunk_row_, chunk_row_)),
          d_scores_(matrix(chunk_row_, chunk_row_)),
          query_slopes_(matrix(chunk_row_, size_row_)),
          once_(p.length <= chunk_ && !p.S) {}

    void run() {
        if (!once_) by_queries();
        by_keys();
    }

private:
    // Forward in time: the gradient of the queries, through the transpose of S.
    void by_queries() {
        if (!sums_.empty) transposed(sums_.S, wide_row_, size_row_, wide_row_, turned_, size_row_);
        for (int64_t start = 0; start < p_.length; start += chunk_) {
            const int count = std::min<int64_t>(chunk_, p_.length - start);
            read_links(start, count);
            read_keys(start, count);
            transposed(value_, wide_row_, padded(count), wide_row_, value_across_, chunk_row_);
            for (int64_t head = first_query(); head < last_query(); ++head) queries_of(head, start, count);
            if (start + count == p_.length) break;
            const bool add = !sums_.empty;
            advance(turned_, sums_.z, sums_.empty, count, [&] {
                const Left values{value_, 1, wide_row_};
                product(values, wide_, count, key_, size_row_, turned_, size_row_, size_row_, add);
                add_keys(sums_.z, count, add);
            });
            sums_.empty = false;
        }
    }

    void queries_of(int64_t head, int64_t start, int count) {
        read_queries(head, start, count, slopes());
        read_loss(head, start, count, true);
        const float* shift = t(head, start);
        const Left loss{g_, wide_row_, 1}, d_scores{d_scores_, chunk_row_, 1};
        for (int i = 0; i < count; i += ROWS) {
            const int rows = std::min(ROWS, count - i), seen = i + rows, columns = padded(seen);
            rows_of_product(loss, i, rows, wide_, value_across_, chunk_row_, d_scores_, chunk_row_, columns,
                            false);
            for (int m = i; m < seen; ++m) shifted(d_scores_ + m * chunk_row_, shift[m], m, columns);
            if (!sums_.empty) {
                rows_of_product(loss, i, rows, wide_, turned_, size_row_, d_query_, size_row_, size_row_,
                                false);
                for (int m = i; m < seen; ++m) {
                    float* row = d_query_ + m * size_row_;
                    const float share = links_.pairs ? links_.reading[m] : 1;
                    for (int d = 0; d < size_row_; d += WIDTH)
                        store(row + d, (load(row + d) + load(sums_.z + d) * shift[m]) * share);
                }
            }
            rows_of_product(d_scores, i, rows, seen, key_, size_row_, d_query_, size_row_, size_row_,
                            !sums_.empty);
            write_queries(head, start, i, rows, slopes());
        }
    }

    void write_queries(int64_t head, int64_t start, int first, int rows, const float* slopes) {
        for (int m = first; m < first + rows; ++m) {
            float* row = d_query_ + m * size_row_;
            if (p_.d_decay) d_decay(start)[m] += dot(row, query_ + m * size_row_, size_row_);
            if (links_.split) scale(row, links_.reading[m], size_row_);
            write_by_slope(p_.d_query, head, start, m, row, slopes);
        }
    }

    // Backward in time: gradients of keys and values; the loss by the state behind a chunk is carried on.
    void by_keys() {
        fill(sums_, p_.d_S_after, p_.d_z_after);
        for (int64_t start = (p_.length - 1) / chunk_ * chunk_; start >= 0; start -= chunk_) {
            const int count = std::min<int64_t>(chunk_, p_.length - start);
            read_links(start, count);
            read_keys(start, count, slopes());
            transposed(key_, size_row_, padded(count), size_row_, across_, chunk_row_);
            transposed(value_, wide_row_, padded(count), wide_row_, value_across_, chunk_row_);
            if (links_.split) outlive(sums_.S, sums_.z, sums_.empty);
            by_sums(count);
            if (links_.pairs && !sums_.empty)
                for (int j = 0; j < count; ++j) {
                    scale(d_key_ + j * size_row_, links_.entering[j], size_row_);
                    scale(d_value_ + j * wide_row_, links_.entering[j], wide_row_);
                }
            if (links_.pairs) outlive(sums_.S, sums_.z, sums_.empty);
            for (int64_t head = first_query(); head < last_query(); ++head) keys_of(head, start, count);
            write_keys(start, count);
        }
        if (p_.S) keep(sums_, p_.d_S, p_.d_z);
    }

    void keys_of(int64_t head, int64_t start, int count) {
        float* slopes = once_ && p_.map != NONE ? query_slopes_ : nullptr;
        read_queries(head, start, count, slopes);
        read_loss(head, start, count, once_);
        const float* shift = t(head, start);
        const Left queries{query_, size_row_, 1}, loss{g_, wide_row_, 1}, own{d_scores_, chunk_row_, 1};
        for (int i = 0; i < count; i += ROWS) {
            const int rows = std::min(ROWS, count - i), seen = i + rows, columns = padded(seen);
            rows_of_product(queries, i, rows, size_, across_, chunk_row_, scores_, chunk_row_, columns,
                            false);
            rows_of_product(loss, i, rows, wide_, value_across_, chunk_row_, d_scores_, chunk_row_, columns,
                            false);
            for (int m = i; m < seen; ++m) {
                link(scores_ + m * chunk_row_, m, columns);
                shifted(d_scores_ + m * chunk_row_, shift[m], m, columns);
            }
            if (!once_) continue;
            rows_of_product(own, i, rows, seen, key_, size_row_, d_query_, size_row_, size_row_, false);
            write_queries(head, start, i, rows, slopes);
        }
        for (int j = 0; j < count; j += ROWS) {  // the queries from its first key on
            const int rows = std::min(ROWS, count - j), seen_by = count - j;
            const Left scores{scores_ + j * chunk_row_, 1, chunk_row_};
            const Left d_scores{d_scores_ + j * chunk_row_, 1, chunk_row_};
            const float *g = g_ + j * wide_row_, *query = query_ + j * size_row_;
            rows_of_product(scores, j, rows, seen_by, g, wide_row_, d_value_, wide_row_, wide_row_, true);
            rows_of_product(d_scores, j, rows, seen_by, query, size_row_, d_key_, size_row_, size_row_, true);
        }
        if (start == 0 && !p_.S) return;  // nothing comes before
        if (links_.pairs)
            for (int i = 0; i < count; ++i) scale(query_ + i * size_row_, links_.reading[i], size_row_);
        add_losses(shift, count);
    }

    void shifted(float* scores, float shift, int row, int columns) const {
        for (int j = 0; j < columns; j += WIDTH) store(scores + j, load(scores + j) + shift);
        link(scores, row, columns);
    }
};
