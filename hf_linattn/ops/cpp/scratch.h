// What a thread computes in.

#pragma once

#include <cstdint>
#include <vector>

// Memory of a thread, kept from call to call: fresh pages would take longer than a small attention.
class Scratch {
    static constexpr int64_t LINE = 16;  // floats: vectors that lie in two lines of cache take twice as long
    std::vector<float> floats_;
    float* free_ = nullptr;

public:
    // Make room for `blocks` of so many floats together.
    void reserve(int64_t count, int64_t blocks) {
        count += (blocks + 1) * LINE;
        if (static_cast<int64_t>(floats_.size()) < count) floats_.resize(count);
        free_ = floats_.data();
    }
    float* take(int64_t count) {
        const auto address = reinterpret_cast<uintptr_t>(free_);
        float* block = free_ + (-address / sizeof(float)) % LINE;
        free_ = block + count;
        return block;
    }
    static Scratch& of_thread() {
        static thread_local Scratch scratch;
        return scratch;
    }
};
