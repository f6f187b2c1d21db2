// One decoded token: it takes the column of the oldest one in a window, the oldest goes over into the state
// of a linear attention, and the query sees both under one normaliser. Window and state are written over in
// place. A token that does not count changes neither.

#pragma once

#include "linear_head.h"
#include "window_head.h"

class WindowDecode : KeyHead<WindowDecodeProblem> {
    static constexpr int TILE = 64;  // columns that are brought to float32 together

    const float scaling_;
    const int64_t column_;
    const bool *valid_, token_counts_;
    const int first_column_, columns_;  // those that may count: a long window takes a short text's time
    const int sinks_, first_sink_, columns_row_, features_, features_row_;
    float *query_, *sink_query_, *scores_, *numerator_, *tile_, *sum_, *top_;
    float *phi_q_, *phi_k_, *evicted_value_, *tail_numerator_, *tail_total_, *log_scale_, *S_, *z_;
    float* phi_map_;

public:
    WindowDecode(const WindowDecodeProblem& p, float scaling, int64_t batch_head)
        : KeyHead(p, batch_head),
          scaling_(scaling),
          column_(at<int64_t>(p.head_index)[row_]),
          valid_(at<bool>(p.ring_valid) + row_ * p.ring_valid_row),
          token_counts_(!p.token_valid || at<bool>(p.token_valid)[row_ * p.token_valid_row]),
          first_column_(first_visible()),
          columns_(last_visible() - first_column_ + 1),
          sinks_(p.sinks),
          first_sink_(padded(columns_)),
          columns_row_(first_sink_ + padded(sinks_)),
          features_(p.features),
          features_row_(padded(features_)) {
        const int64_t widest = std::max(key_row_, value_row_);
        reserve(shared_ * (2 * key_row_ + columns_row_ + features_row_ + 2 * value_row_ + 4) + TILE * widest +
                2 * features_row_ + value_row_ + features_ * value_row_ + 2 * padded(features_ / 2));
        query_ = alloc(shared_, key_row_);
        sink_query_ = alloc(shared_, key_row_);
        scores_ = alloc(shared_, columns_row_);
        numerator_ = alloc(shared_, value_row_);
        tile_ = alloc(TILE, widest);
        sum_ = alloc(shared_, 1);
        top_ = alloc(shared_, 1);
        phi_q_ = alloc(shared_, features_row_);
        phi_k_ = alloc(1, features_row_);
        evicted_value_ = alloc(1, value_row_);
        tail_numerator_ = alloc(shared_, value_row_);
        tail_total_ = alloc(shared_, 1);
        log_scale_ = alloc(shared_, 1);
        z_ = alloc(1, features_row_);
        phi_map_ = alloc(2, padded(features_ / 2));
        S_ = value_dim_ == value_row_ ? nullptr : alloc(features_, value_row_);
    }

    void run() {
        read_query(p_.query, query_);
        if (sinks_) read_query(p_.sink_query, sink_query_);
        for (int i = 0; i < shared_ && p_.turn_cos; ++i) turn(sink_query_ + i * key_row_);
        if (p_.S) read_tail();  // before the oldest key is written over
        write_column(p_.key, p_.ring_key, head_dim_);
        write_column(p_.value, p_.ring_value, value_dim_);
        for (int from = 0; from < columns_; from += TILE)
            score_columns(from, std::min(TILE, columns_ - from));
        for (int from = 0; from < sinks_; from += TILE) score_sinks(from, std::min(TILE, sinks_ - from));
        for (int i = 0; i < shared_; ++i) softmax_row(i);
        for (int from = 0; from < columns_; from += TILE)
            add_values(p_.ring_value, first_column_, from, std::min(TILE, columns_ - from), scores_, from > 0);
        for (int from = 0; from < sinks_; from += TILE)
            add_values(p_.sink_value, 0, from, std::min(TILE, sinks_ - from), scores_ + first_sink_, true);
        for (int i = 0; i < shared_; ++i) write_row(i);
    }

private:
    void read_query(const Array& from, float* to) const {
        for (int64_t head = first_query(); head < last_query(); ++head, to += key_row_) {
            read_row(from, head, 0, to, head_dim_, key_row_);
            scale(to, scaling_, key_row_);
        }
    }

    // x cos + (-second half, first half) sin, as Llama's rotary embedding has it.
    void turn(float* x) const {
        const float* cosine = at<float>(p_.turn_cos) + row_ * p_.turn_row;
        const float* sine = at<float>(p_.turn_sin) + row_ * p_.turn_row;
        const int64_t half = p_.turned / 2;
        for (int64_t i = 0; i < half; ++i) {
            const float first = x[i], second = x[half + i];
            x[i] = first * cosine[i] - second * sine[i];
            x[half + i] = second * cosine[half + i] + first * sine[half + i];
        }
    }

    bool visible(int64_t column) const { return valid_[column] || (column == column_ && token_counts_); }

    // The first column where none counts.
    int first_visible() const {
        for (int column = 0; column < p_.columns; ++column)
            if (visible(column)) return column;
        return 0;
    }

    int last_visible() const {
        for (int column = p_.columns - 1; column > first_column_; --column)
            if (visible(column)) return column;
        return first_column_;
    }

    void write_column(const Array& from, const Array& to, int count) const {
        if (!token_counts_) return;
        const int64_t bytes = to.dtype == FLOAT32 ? 4 : 2;
        char* target = at<char>(to.data) + bytes * offset(to, row_, head_, column_);
        memcpy(target, at<char>(from.data) + bytes * offset(from, row_, head_, 0), bytes * count);
    }

    // The oldest token goes over into the state, which every query reads.
    void read_tail() {
        float *S = at<float>(p_.S) + batch_head_ * features_ * value_dim_,
              *z = at<float>(p_.z) + batch_head_ * features_;
        for (int d = 0; S_ && d < features_; ++d)
            read_dense(S + d * value_dim_, value_dim_, S_ + d * value_row_, value_row_);
        read_dense(z, features_, z_, features_row_);
        if (valid_[column_] && token_counts_) add_evicted(S_ ? S_ : S);
        for (int d = 0; S_ && d < features_; ++d)
            memcpy(S + d * value_dim_, S_ + d * value_row_, value_dim_ * sizeof(float));
        memcpy(z, z_, features_ * sizeof(float));
        for (int i = 0; i < shared_; ++i) {
            const int64_t head = first_query() + i, query = row_ * p_.heads + head;
            float* phi = phi_q_ + i * features_row_;
            if (p_.map_query) {
                learned_features(p_.map_query, head, p_.tail_query, head, 0, phi);
                log_scale_[i] = 0;
                tail_total_[i] = dot(phi, z_, features_row_);
                continue;
            }
            read_row(p_.tail_query, head, 0, phi, features_, features_row_);
            log_scale_[i] = p_.query_log_scale       ? at<float>(p_.query_log_scale)[query]
                            : p_.feature_map == ELU1 ? query_shift(phi, features_)
                                                     : 0;
            feature_map(p_.feature_map, p_.eps, true, phi, nullptr, features_);
            tail_total_[i] = dot(phi, z_, features_row_);
        }
        product({phi_q_, features_row_, 1}, shared_, features_, S_ ? S_ : S, value_row_, tail_numerator_,
                value_row_, value_row_, false);
    }

    void add_evicted(float* S) {
        const bool in_ring = !p_.evicted_key.data;
        const Array& key = in_ring ? p_.ring_key : p_.evicted_key;
        const int64_t token = in_ring ? column_ : 0;
        if (p_.map_key) {
            learned_features(p_.map_key, head_, key, head_, token, phi_k_);
        } else {
            read_row(key, head_, token, phi_k_, features_, features_row_);
            feature_map(p_.feature_map, p_.eps, false, phi_k_, nullptr, features_);
        }
        read_row(in_ring ? p_.ring_value : p_.evicted_value, head_, in_ring ? column_ : 0, evicted_value_,
                 value_dim_, value_row_);
        const float decay = p_.log_decay     ? at<float>(p_.log_decay)[batch_head_]
                            : p_.gate.weight ? log_decay_of(p_.gate, head_, evicted_value_, value_dim_)
                                             : 0;
        const float kept = std::exp(decay);
        for (int d = 0; d < features_; ++d) {
            float* row = S + d * value_row_;
            for (int e = 0; e < value_row_; e += WIDTH)
                store(row + e, load(row + e) * kept + load(evicted_value_ + e) * phi_k_[d]);
        }
        for (int d = 0; d < features_row_; d += WIDTH) store(z_ + d, load(z_ + d) * kept + load(phi_k_ + d));
    }

    // [softmax(W x), softmax(-W x)], held above eps.
    void learned_features(int64_t weights, int64_t index, const Array& from, int64_t head, int64_t token,
                          float* phi) {
        const int half = features_ / 2, vectors = padded(half);
        float *x = tile_, *projected = phi_map_, *part = phi_map_ + vectors;
        read_row(from, head, token, x, head_dim_, key_row_);
        const int64_t first = index * half * head_dim_;
        if (p_.map_dtype == BFLOAT16)
            apply(at<Short>(weights) + first, nullptr, half, head_dim_, x, projected);
        else
            apply(at<float>(weights) + first, nullptr, half, head_dim_, x, projected);
        for (int side = 0; side < 2; ++side) {
            for (int i = half; i < vectors; ++i) projected[i] = NEGATIVE_INFINITY;
            const float total = exponentials(projected, vectors, part).sum;
            const float least = static_cast<float>(p_.eps);
            scale(part, 1 / total, vectors);
            for (int i = 0; i < half; ++i) phi[side * half + i] = part[i] > least ? part[i] : least;
            scale(projected, -1, vectors);
        }
        for (int i = features_; i < features_row_; ++i) phi[i] = 0;
    }

    static void read_dense(const float* from, int count, float* to, int row) {
        memcpy(to, from, count * sizeof(float));
        for (int i = count; i < row; ++i) to[i] = 0;
    }

    // Scores of some columns, counted from the first that may count.
    void score_columns(int from, int count) {
        const Rows keys = rows_of(p_.ring_key, first_column_ + from, count, head_dim_, key_row_, tile_);
        for (int i = 0; i < shared_; ++i) {
            float *scores = scores_ + i * columns_row_ + from, *query = query_ + i * key_row_;
            dots(query, keys.data, keys.stride, count, key_row_, scores);
            for (int j = 0; j < count; ++j)
                if (!visible(first_column_ + from + j)) scores[j] = NEGATIVE_INFINITY;
        }
    }

    void score_sinks(int from, int count) {
        const Rows keys = rows_of(p_.sink_key, from, count, head_dim_, key_row_, tile_);
        for (int i = 0; i < shared_; ++i)
            for (int j = 0; j < count; ++j)
                scores_[i * columns_row_ + first_sink_ + from + j] =
                    dot(sink_query_ + i * key_row_, keys.data + j * keys.stride, key_row_);
    }

    // Scores to exponentials, over that of the largest.
    void softmax_row(int i) {
        float* scores = scores_ + i * columns_row_;
        for (int j = columns_; j < first_sink_; ++j) scores[j] = NEGATIVE_INFINITY;
        for (int j = first_sink_ + sinks_; j < columns_row_; ++j) scores[j] = NEGATIVE_INFINITY;
        const Exponentials found = exponentials(scores, columns_row_, scores);
        top_[i] = found.top;
        sum_[i] = found.sum;
    }

    void add_values(const Array& from, int start, int first, int count, const float* scores, bool add) {
        const Rows values = rows_of(from, start + first, count, value_dim_, value_row_, tile_);
        product({scores + first, columns_row_, 1}, shared_, count, values.data, values.stride, numerator_,
                value_row_, value_row_, add);
    }

    void write_row(int i) {
        float *numerator = numerator_ + i * value_row_, *tail = tail_numerator_ + i * value_row_;
        const float total = p_.S ? tail_total_[i] : 0;
        join_softmax(numerator, top_[i], sum_[i], tail, p_.mix ? 0 : total, log_scale_[i], value_row_);
        if (p_.mix && total > 0) {
            const float given = at<float>(p_.mix)[first_query() + i];
            const float share = p_.mix_logit ? 1 / (1 + std::exp(-given)) : given,
                        other = (1 - share) / total;
            for (int e = 0; e < value_row_; e += WIDTH)
                store(numerator + e, load(numerator + e) * share + load(tail + e) * other);
        }
        write(p_.output, offset(p_.output, row_, first_query() + i, 0), value_dim_, numerator);
    }
};

// Columns and mask, which all key heads of a row read, are written when these are done.
inline void advance_ring(const WindowDecodeProblem& p) {
    for (int64_t row = 0; row < p.batch; ++row) {
        if (p.token_valid && !at<bool>(p.token_valid)[row * p.token_valid_row]) continue;
        int64_t& column = at<int64_t>(p.head_index)[row];
        at<bool>(p.ring_valid)[row * p.ring_valid_row + column] = true;
        column = (column + 1) % p.columns;
    }
}
