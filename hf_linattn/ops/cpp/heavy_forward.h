// Many tokens of a window with heavy hitters: from one choice of tokens to the next, a few queries at a time.
//
// Keys and values stay in the slot that they were put in; when a block leaves, its slots and those of what is
// dropped take the next tokens. Sinks have slots of their own, before the others, as queries may be turned to
// meet them. What is kept is read before the first token, and written behind the last, in its order.

#pragma once

#include "heavy_head.h"

template <class Element>
class HeavyForward : HeavyHead {
    static constexpr int QUERIES = 48;  // of a head that go through a product together, at most
    static constexpr bool SCALED_QUERIES = STEPS<Element> == 1;

    const int sink_slots_, slots_;
    int64_t evicted_ = 0;  // blocks
    int next_, used_, free_ = 0;  // the first slot never used; whole vectors before it; slots that are free again
    float faded_ = 1;  // what attention got before counts behind the tokens of now
    int *slot_of_, *free_slots_, *new_slots_, *rank_;
    Element *keys_, *values_, *query_rows_, *weight_rows_;
    float *query_, *scores_, *numerator_, *weight_, *got_, *bias_, *shares_, *staging_;

    static int sink_slots(const HeavyProblem& p) { return padded(p.sinks); }
    static int slots(const HeavyProblem& p) { return sink_slots(p) + padded(p.heavy + p.window + p.block); }

    static int64_t scratch_floats(const HeavyProblem& p) {
        const int64_t key_row = padded(p.head_dim), value_row = padded(p.value_dim), s = slots(p);
        const int64_t columns = p.sinks + p.heavy + p.window + p.block;
        return columns + 2 * s + QUERIES + steps<Element>(key_row) * s + steps<Element>(s) * value_row +
               along_size<Element>(QUERIES, key_row) + along_size<Element>(QUERIES, s) +
               QUERIES * (key_row + s + value_row + 1) + 3 * s + std::max(key_row, value_row);
    }

public:
    HeavyForward(const HeavyProblem& p, float scaling, int64_t batch_head)
        : HeavyHead(p, scaling, batch_head, scratch_floats(p)),
          sink_slots_(sink_slots(p)),
          slots_(slots(p)),
          slot_of_(alloc_of<int>(columns_)),
          free_slots_(alloc_of<int>(slots_)),
          new_slots_(alloc_of<int>(QUERIES)),
          rank_(alloc_of<int>(slots_)),
          keys_(alloc_of<Element>(steps<Element>(key_row_) * slots_)),
          values_(alloc_of<Element>(steps<Element>(slots_) * value_row_)),
          query_rows_(alloc_of<Element>(along_size<Element>(QUERIES, key_row_))),
          weight_rows_(alloc_of<Element>(along_size<Element>(QUERIES, slots_))),
          query_(alloc(QUERIES, key_row_)),
          scores_(alloc(QUERIES, slots_)),
          numerator_(alloc(QUERIES, value_row_)),
          weight_(alloc(1, slots_)),
          got_(alloc(1, slots_)),
          bias_(alloc(1, slots_)),
          shares_(alloc(1, QUERIES)),
          staging_(alloc(1, std::max(key_row_, value_row_))) {}

    void run() {
        memset(keys_, 0, steps<Element>(key_row_) * slots_ * sizeof(Element));
        memset(values_, 0, steps<Element>(slots_) * value_row_ * sizeof(Element));
        memset(weight_, 0, slots_ * sizeof(float));
        for (int j = 0; j < slots_; ++j) bias_[j] = NEGATIVE_INFINITY;
        next_ = used_ = sink_slots_;
        load_kept();
        for (int64_t token = 0; token < count_;) {
            const int64_t rank = seen_ + token, blocks = left(rank);
            if (blocks && rank == begin(blocks)) evict(blocks);
            const int64_t until = std::min(begin(blocks + 1) - seen_, count_);
            const int count = static_cast<int>(std::min<int64_t>(until - token, QUERIES));
            add_tokens(token, count);
            for (int64_t head = first_query(); head < last_query(); ++head) attend(head, token, count);
            fade();
            token += count;
        }
        write_kept();
    }

private:
    int take_slot() {
        if (free_) return free_slots_[--free_];
        used_ = padded(next_ + 1);
        return next_++;
    }

    // Key and value of a slot, from float32 rows.
    void put_key(const float* key, int slot) {
        if constexpr (STEPS<Element> == 1)
            for (int d = 0; d < head_dim_; ++d) keys_[d * slots_ + slot] = key[d];
        else
            for (int d = 0; d < head_dim_; d += 2) {  // behind the last number there is 0, or nobody asks
                const uint32_t second = d + 1 < head_dim_ ? float_to_bfloat16(key[d + 1]) : 0;
                const uint32_t both = float_to_bfloat16(key[d]) | second << 16;
                memcpy(keys_ + d / 2 * slots_ + slot, &both, sizeof both);
            }
    }
    void put_value(const float* value, int slot) {
        if constexpr (STEPS<Element> == 1) {
            memcpy(values_ + slot * value_row_, value, value_dim_ * sizeof(float));
        } else {
            char* pairs = reinterpret_cast<char*>(values_ + slot / 2 * value_row_) + slot % 2 * 2;
            for (int e = 0; e < value_dim_; ++e) {
                const uint16_t bits = float_to_bfloat16(value[e]);
                memcpy(pairs + 4 * e, &bits, sizeof bits);
            }
        }
    }

    void put(const Array& key, const Array& value, int64_t token, int slot) {
        read_row(key, head_, token, staging_, head_dim_, key_row_);
        put_key(staging_, slot);
        read_row(value, head_, token, staging_, value_dim_, value_row_);
        put_value(staging_, slot);
    }

    // Columns that hold a token when so many have been seen.
    template <class Do>
    void for_each_column(int64_t seen, int64_t blocks, Do with) {
        for (int j = 0; j < std::min<int64_t>(sinks_, seen); ++j) with(j);
        for (int j = 0; j < held(blocks); ++j) with(sinks_ + j);
        const int64_t window = seen - sinks_ - blocks * block_;
        for (int j = 0; j < window; ++j) with(first_ + j);
    }

    void load_kept() {
        evicted_ = seen_ ? left(seen_ - 1) : 0;
        for_each_column(seen_, evicted_, [&](int column) {
            const int slot = column < sinks_ ? column : take_slot();
            put(p_.kept_key, p_.kept_value, column, slot);
            slot_of_[column] = slot;
            weight_[slot] = kept_weight_[column];
            rank_[slot] = kept_rank_[column];
            bias_[slot] = 0;
        });
    }

    // Columns that hold no token are 0.
    void write_kept() {
        const int64_t after = seen_ + count_;
        int last = 0;
        const auto clear = [&](int from, int to) {
            for (int j = from; j < to; ++j) {
                memset(kept(p_.kept_key, j), 0, bytes_of(p_.kept_key) * head_dim_);
                memset(kept(p_.kept_value, j), 0, bytes_of(p_.kept_value) * value_dim_);
                kept_weight_[j] = 0;
                kept_rank_[j] = 0;
            }
        };
        for_each_column(after, evicted_, [&](int column) {
            clear(last, column);
            const int slot = slot_of_[column];
            for (int d = 0; d < head_dim_; ++d) staging_[d] = key_number(slot, d);
            write_kept_row(p_.kept_key, column, head_dim_);
            for (int e = 0; e < value_dim_; ++e) staging_[e] = value_number(slot, e);
            write_kept_row(p_.kept_value, column, value_dim_);
            kept_weight_[column] = weight_[slot];
            kept_rank_[column] = rank_[slot];
            last = column + 1;
        });
        clear(last, columns_);
    }
    void write_kept_row(const Array& x, int column, int count) {
        write(x, offset(x, row_, head_, column), count, staging_);
    }
    float key_number(int slot, int d) const {
        if constexpr (STEPS<Element> == 1) {
            return keys_[d * slots_ + slot];
        } else {
            uint32_t both;
            memcpy(&both, keys_ + d / 2 * slots_ + slot, sizeof both);
            return bfloat16_to_float(static_cast<uint16_t>(d % 2 ? both >> 16 : both & 0xffff));
        }
    }
    float value_number(int slot, int e) const {
        if constexpr (STEPS<Element> == 1) {
            return values_[slot * value_row_ + e];
        } else {
            uint16_t bits;
            memcpy(&bits, reinterpret_cast<const char*>(values_ + slot / 2 * value_row_ + e) + slot % 2 * 2,
                   sizeof bits);
            return bfloat16_to_float(bits);
        }
    }

    void evict(int64_t blocks) {
        const int chosen = choose(blocks, weight_, rank_, [&](int column) { return slot_of_[column]; });
        const int count = held(blocks - 1) + block_;
        for (int j = 0; j < count; ++j) candidates_[j].column = slot_of_[candidates_[j].column];
        for (int j = 0; j < chosen; ++j) slot_of_[sinks_ + j] = candidates_[j].column;
        if (p_.chosen) {
            int32_t* ranks = at<int32_t>(p_.chosen) + (batch_head_ * p_.choices + blocks - 1) * heavy_;
            for (int j = 0; j < chosen; ++j) ranks[j] = rank_[candidates_[j].column];
        }
        for (int j = chosen; j < count; ++j) {
            const int slot = candidates_[j].column;
            bias_[slot] = NEGATIVE_INFINITY;
            weight_[slot] = 0;
            free_slots_[free_++] = slot;
        }
        memmove(slot_of_ + first_, slot_of_ + first_ + block_, size_ * sizeof(int));
        evicted_ = blocks;
    }

    void add_tokens(int64_t token, int count) {
        for (int i = 0; i < count; ++i) {
            const int64_t rank = seen_ + token + i;
            const int slot = rank < sinks_ ? static_cast<int>(rank) : take_slot();
            slot_of_[column_of(rank, evicted_)] = slot;
            put(p_.key, p_.value, place(token + i), slot);
            weight_[slot] = 0;
            rank_[slot] = static_cast<int>(rank);
            new_slots_[i] = slot;
        }
        memset(got_, 0, used_ * sizeof(float));
        double share = 1;
        for (int i = count - 1; i >= 0; --i, share *= p_.fade) shares_[i] = static_cast<float>(share);
        faded_ = static_cast<float>(share);
    }

    Factor<Element> read_queries(const Array& x, int64_t head, int64_t token, int count) {
        for (int i = 0; i < count; ++i) {
            float* query = query_ + i * key_row_;
            read_row(x, head, place(token + i), query, head_dim_, key_row_);
            if (SCALED_QUERIES) scale(query, scaling_, key_row_);
        }
        return along_rows(query_, key_row_, count, key_row_, query_rows_);
    }

    void attend(int64_t head, int64_t token, int count) {
        const int inner = steps<Element>(head_dim_);
        product(read_queries(p_.query, head, token, count), count, inner, keys_, slots_, scores_, slots_, used_,
                false);
        if (p_.near.data)
            product(read_queries(p_.near, head, token, count), count, inner, keys_, slots_, scores_, slots_,
                    sink_slots_, false);
        for (int i = 0; i < count; ++i) {
            bias_[new_slots_[i]] = 0;
            softmax_row(scores_ + i * slots_, shares_[i]);
        }
        const bool last = head + 1 == last_query();
        for (int i = 0; i < count && !last; ++i) bias_[new_slots_[i]] = NEGATIVE_INFINITY;
        const Factor<Element> weights = along_rows(scores_, slots_, count, used_, weight_rows_);
        product(weights, count, steps<Element>(used_), values_, value_row_, numerator_, value_row_, value_row_,
                false);
        for (int i = 0; i < count; ++i)
            write(p_.output, offset(p_.output, row_, head, place(token + i)), value_dim_,
                  numerator_ + i * value_row_);
    }

    void softmax_row(float* scores, float share) {
        const float factor = SCALED_QUERIES ? 1 : scaling_;
        Floats peak = broadcast(std::numeric_limits<float>::lowest()), total = {};
        for (int j = 0; j < used_; j += WIDTH) {
            const Floats hidden = load(bias_ + j);  // scores may be NaN where it is -inf
            const Floats values = hidden < 0.0f ? hidden : load(scores + j);
            store(scores + j, values);
            peak = values > peak ? values : peak;
        }
        const float top = max_of(peak) * factor;
        for (int j = 0; j < used_; j += WIDTH) {
            const Floats weight = exp_of_scores<Element>(load(scores + j), factor, top);
            store(scores + j, weight);
            total += weight;
        }
        const float inverse = 1 / sum(total);
        for (int j = 0; j < used_; j += WIDTH) {
            const Floats weight = load(scores + j) * inverse;
            store(scores + j, weight);
            store(got_ + j, load(got_ + j) + weight * share);
        }
    }

    void fade() {
        for (int j = 0; j < used_; j += WIDTH)
            store(weight_ + j, load(weight_ + j) * faded_ + load(got_ + j));
    }
};
