// One decoded token behind a window with heavy hitters: what is kept is written over in place.

#pragma once

#include "heavy_head.h"

class HeavyToken : HeavyHead {
    static constexpr int TILE = 64;  // columns that are brought to float32 together

    const int used_, row_of_scores_;
    float *query_, *near_, *scores_, *numerator_, *tile_, *got_;
    char* moved_;

    static int64_t scratch_floats(const HeavyProblem& p) {
        const int64_t shared = p.heads / p.kv_heads, key_row = padded(p.head_dim),
                      value_row = padded(p.value_dim), columns = padded(p.sinks + p.heavy + p.window + p.block),
                      widest = std::max(key_row, value_row);
        return shared * (2 * key_row + columns + value_row) + TILE * widest + columns + p.heavy * widest;
    }

public:
    HeavyToken(const HeavyProblem& p, float scaling, int64_t batch_head)
        : HeavyHead(p, scaling, batch_head, scratch_floats(p)),
          used_(columns_used()),
          row_of_scores_(padded(used_)),
          query_(alloc(shared_, key_row_)),
          near_(alloc(shared_, key_row_)),
          scores_(alloc(shared_, row_of_scores_)),
          numerator_(alloc(shared_, value_row_)),
          tile_(alloc(TILE, std::max(key_row_, value_row_))),
          got_(alloc(1, row_of_scores_)),
          moved_(reinterpret_cast<char*>(alloc(heavy_, std::max(key_row_, value_row_)))) {}

    void run() {
        if (!count_) return;
        const int64_t blocks = left(seen_);
        if (blocks && seen_ == begin(blocks)) evict(blocks);
        const int column =
            static_cast<int>(seen_ < sinks_ ? seen_ : seen_ + heavy_ - blocks * block_);
        keep(p_.key, place(0), p_.kept_key, column, head_dim_);
        keep(p_.value, place(0), p_.kept_value, column, value_dim_);
        kept_weight_[column] = 0;
        kept_rank_[column] = static_cast<int32_t>(seen_);
        read_query(p_.query, query_);
        if (p_.near.data) read_query(p_.near, near_);
        for (int from = 0; from < used_; from += TILE) score(from, std::min(TILE, used_ - from));
        hide(blocks);
        memset(got_, 0, row_of_scores_ * sizeof(float));
        for (int i = 0; i < shared_; ++i) softmax_row(scores_ + i * row_of_scores_);
        for (int from = 0; from < used_; from += TILE) add_values(from, std::min(TILE, used_ - from));
        for (int64_t head = first_query(); head < last_query(); ++head)
            write(p_.output, offset(p_.output, row_, head, place(0)), value_dim_,
                  numerator_ + (head - first_query()) * value_row_);
        const float fade = static_cast<float>(p_.fade);
        for (int j = 0; j < used_; ++j) kept_weight_[j] = kept_weight_[j] * fade + got_[j];
    }

private:
    // Columns up to the token's own.
    int columns_used() const {
        const int64_t last = seen_ < sinks_ ? seen_ : seen_ + heavy_ - left(seen_) * block_;
        return static_cast<int>(last) + 1;
    }

    void read_query(const Array& from, float* to) const {
        for (int64_t head = first_query(); head < last_query(); ++head, to += key_row_) {
            read_row(from, head, place(0), to, head_dim_, key_row_);
            scale(to, scaling_, key_row_);
        }
    }

    void evict(int64_t blocks) {
        const int chosen = choose(blocks, kept_weight_, kept_rank_, [](int column) { return column; });
        move(kept(p_.kept_key, 0), bytes_of(p_.kept_key) * head_dim_, bytes_of(p_.kept_key) * p_.kept_key.token,
             chosen);
        move(kept(p_.kept_value, 0), bytes_of(p_.kept_value) * value_dim_,
             bytes_of(p_.kept_value) * p_.kept_value.token, chosen);
        move(reinterpret_cast<char*>(kept_weight_), sizeof(float), sizeof(float), chosen);
        move(reinterpret_cast<char*>(kept_rank_), sizeof(int32_t), sizeof(int32_t), chosen);
    }

    // The chosen columns to the front, the window a block on, 0 behind it.
    void move(char* columns, int64_t bytes, int64_t stride, int chosen) {
        for (int j = 0; j < chosen; ++j)
            memcpy(moved_ + j * bytes, columns + candidates_[j].column * stride, bytes);
        for (int j = 0; j < chosen; ++j) memcpy(columns + (sinks_ + j) * stride, moved_ + j * bytes, bytes);
        for (int j = first_; j < first_ + size_; ++j)
            memcpy(columns + j * stride, columns + (j + block_) * stride, bytes);
        for (int j = first_ + size_; j < columns_; ++j) memset(columns + j * stride, 0, bytes);
    }

    // Columns as they lie if they are whole vectors of float32, else in `tile_`.
    std::pair<const float*, int64_t> rows_of(const Array& x, int from, int count, int width, int row) const {
        if (x.dtype == FLOAT32 && width == row)
            return {at<float>(x.data) + offset(x, row_, head_, from), x.token};
        for (int j = 0; j < count; ++j) read_row(x, head_, from + j, tile_ + j * row, width, row);
        return {tile_, row};
    }

    void score(int from, int count) {
        const auto [keys, stride] = rows_of(p_.kept_key, from, count, head_dim_, key_row_);
        for (int i = 0; i < shared_; ++i) {
            const float *query = query_ + i * key_row_, *near = near_ + i * key_row_;
            float* scores = scores_ + i * row_of_scores_ + from;
            int j = 0;
            for (; p_.near.data && from + j < sinks_ && j < count; ++j)
                scores[j] = dot(near, keys + j * stride, key_row_);
            for (; j + WIDTH <= count; j += WIDTH) {  // as many at once as a vector has sums
                Floats parts[WIDTH];
                for (int m = 0; m < WIDTH; ++m) {
                    const float* key = keys + (j + m) * stride;
                    parts[m] = load(query) * load(key);
                    for (int d = WIDTH; d < key_row_; d += WIDTH) parts[m] += load(query + d) * load(key + d);
                }
                store(scores + j, sums(parts));
            }
            for (; j < count; ++j) scores[j] = dot(query, keys + j * stride, key_row_);
        }
    }

    // Columns of heavy hitters that hold none yet, and what fills the last vector.
    void hide(int64_t blocks) {
        for (int i = 0; i < shared_; ++i) {
            float* scores = scores_ + i * row_of_scores_;
            for (int j = sinks_ + held(blocks); j < std::min(first_, used_); ++j)
                scores[j] = NEGATIVE_INFINITY;
            for (int j = used_; j < row_of_scores_; ++j) scores[j] = NEGATIVE_INFINITY;
        }
    }

    void softmax_row(float* scores) {
        Floats peak = load(scores), total = {};
        for (int j = WIDTH; j < row_of_scores_; j += WIDTH) {
            const Floats values = load(scores + j);
            peak = values > peak ? values : peak;
        }
        const float top = max_of(peak);
        for (int j = 0; j < row_of_scores_; j += WIDTH) {
            const Floats weight = exp_nonpositive(load(scores + j) - top);
            store(scores + j, weight);
            total += weight;
        }
        const float factor = 1 / sum(total);
        for (int j = 0; j < row_of_scores_; j += WIDTH) {
            const Floats weight = load(scores + j) * factor;
            store(scores + j, weight);
            store(got_ + j, load(got_ + j) + weight);
        }
    }

    void add_values(int from, int count) {
        const auto [values, stride] = rows_of(p_.kept_value, from, count, value_dim_, value_row_);
        product({scores_ + from, row_of_scores_, 1}, shared_, count, values, stride, numerator_, value_row_,
                value_row_, from > 0);
    }
};
